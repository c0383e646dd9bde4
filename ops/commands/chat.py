"""`colibri chat`: a conversation with a running server, whose history the client keeps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.damping import DampingOption, ScopeOption, read_policy
from ops.commands.streaming import (
    MaxTokens,
    ModelName,
    Seed,
    Target,
    Temperature,
    Timeout,
    TopK,
    TopP,
    show_stream,
    write_note,
    write_text,
)

if TYPE_CHECKING:
    from colibri.v1 import inference_pb2 as pb
    from service.client import Client

EXIT_WORDS = {"/exit", "/quit"}


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Talk to a running server. Ctrl-C breaks an answer off; end of input, /exit or Ctrl-C at the prompt leaves.")
    def chat(
        message: Annotated[str | None, typer.Argument(help="Say just this and leave after the answer.")] = None,
        system: Annotated[str | None, typer.Option(help="A system message in front.")] = None,
        target: Target = "localhost:50051",
        model: ModelName = "",
        max_tokens: MaxTokens = None,
        temperature: Temperature = None,
        top_p: TopP = None,
        top_k: TopK = None,
        seed: Seed = None,
        damping: DampingOption = None,
        damping_scope: ScopeOption = None,
        timeout: Timeout = None,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No figures.")] = False,
    ) -> None:
        policy = read_policy(damping, damping_scope)
        from service.client import Client, generate_request

        request = generate_request(
            messages=[("system", system)] if system is not None else [],
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            routing=policy,
        )
        with Client(target) as client:
            for line in [message] if message is not None else user_lines():
                take_turn(client, request, line, timeout=timeout, quiet=quiet)


def user_lines() -> Iterator[str]:
    """What the user types, a line a turn; prompts on a terminal only."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line in EXIT_WORDS:
            return
        if line:
            yield line


def take_turn(client: Client, request: pb.GenerateRequest, line: str, *, timeout: float | None, quiet: bool) -> None:
    """One question and its answer. Both join the history in `request`; an answer broken off by Ctrl-C takes its question with it."""
    request.chat.messages.add(role="user", content=line)
    try:
        streamed = show_stream(client.generate(request, timeout=timeout), write=write_text)
    except KeyboardInterrupt:
        del request.chat.messages[-1]
        write_text("\n")
        write_note("broken off; the question is forgotten")
        return
    request.chat.messages.add(role="assistant", content=streamed.text)
    write_text("\n")
    if not quiet:
        write_note(streamed.summary())
