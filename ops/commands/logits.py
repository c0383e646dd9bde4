"""`colibri logits`: the engine's numbers for a prompt, to compare with a reference."""

from __future__ import annotations

import os
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import ModelFile, check_output, container_path, parse_ints

if TYPE_CHECKING:
    from ops.logits import LogitsResult


class KvFormat(StrEnum):
    """How keys and values are kept."""

    F32 = "f32"
    BF16 = "bf16"


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Write logits, router choices and greedy tokens of a prompt to an .npz file.")
    def logits(
        path: ModelFile,
        tokens: Annotated[str, typer.Option(help="Token ids, 1,2,3 or @file.")],
        out: Annotated[Path, typer.Option(help="File to write: logits [T,V], layers [L], experts and weights [L,T,k], greedy [N].")],
        greedy: Annotated[int, typer.Option(min=0, help="Tokens to continue with; end of sequence is ignored.")] = 0,
        workers: Annotated[int, typer.Option(min=0, help="Worker processes per NUMA node; 0 computes in this process.")] = 0,
        chunk: Annotated[int | None, typer.Option(min=1, help="Prefill chunk in tokens.")] = None,
        kv_format: Annotated[KvFormat, typer.Option(help="How keys and values are kept.")] = KvFormat.F32,
    ) -> None:
        prompt = parse_ints(tokens, option="--tokens")
        container_path(path)
        check_output(out)
        from ops.logits import compute_logits

        result = compute_logits(path, tokens=prompt, greedy=greedy, workers=workers, chunk=chunk, kv_format=kv_format.value)
        write_npz(out, result)
        routed = f", {len(result.layers)} routed layers" if len(result.layers) else ""
        typer.echo(f"{out}: {result.logits.shape[0]} tokens, vocabulary {result.logits.shape[1]}{routed}, {len(result.greedy)} greedy")


def write_npz(out: Path, result: LogitsResult) -> None:
    """Writes to a temporary name in the same directory and renames: `out` is whole or untouched."""
    import numpy as np

    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(
                file,
                logits=result.logits,
                layers=result.layers,
                experts=result.experts,
                weights=result.weights,
                greedy=result.greedy,
            )
        os.chmod(name, 0o644)
        os.replace(name, out)
    except BaseException:
        os.unlink(name)
        raise
