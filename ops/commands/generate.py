"""`colibri generate`: one prompt to a running server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ops.commands.common import parse_ints
from ops.commands.damping import DampingOption, ScopeOption, read_policy
from ops.commands.streaming import (
    MaxTokens,
    ModelName,
    Seed,
    Stop,
    Target,
    Temperature,
    Timeout,
    TopK,
    TopP,
    show_stream,
    write_note,
    write_text,
)


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Continue a text (argument or stdin) on a running server, streaming.")
    def generate(
        prompt: Annotated[str | None, typer.Argument(help="The text; - or nothing reads stdin.")] = None,
        tokens: Annotated[str | None, typer.Option(help="Token ids instead of text, 1,2,3 or @file.")] = None,
        target: Target = "localhost:50051",
        model: ModelName = "",
        max_tokens: MaxTokens = None,
        temperature: Temperature = None,
        top_p: TopP = None,
        top_k: TopK = None,
        seed: Seed = None,
        stop: Stop = None,
        damping: DampingOption = None,
        damping_scope: ScopeOption = None,
        timeout: Timeout = None,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The text alone.")] = False,
    ) -> None:
        if prompt is not None and tokens is not None:
            raise typer.BadParameter("give a prompt or --tokens, not both")
        ids = parse_ints(tokens, option="--tokens") if tokens is not None else None
        text = (sys.stdin.read() if prompt in (None, "-") else prompt) if ids is None else None
        policy = read_policy(damping, damping_scope)
        from service.client import Client, generate_request

        request = generate_request(
            text,
            tokens=ids and check_ids(ids),
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop or (),
            routing=policy,
        )
        with Client(target) as client:
            streamed = show_stream(client.generate(request, timeout=timeout), write=write_text)
        write_text("\n")
        if not quiet:
            write_note(streamed.summary())


def check_ids(ids: list[int]) -> list[int]:
    """Refuses what the message cannot carry."""
    for token in ids:
        if not 0 <= token < 1 << 32:
            raise typer.BadParameter(f"--tokens: {token} is no token id")
    return ids
