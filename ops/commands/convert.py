"""`colibri convert`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ops.commands.common import CommandError, check_output, human_bytes

OnProgress = Callable[[int, int, str], None]


class Quant(StrEnum):
    """Weight formats; docs/models.md says what each keeps."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


Head = Annotated[Quant | None, typer.Option(help="Format of lm_head, and of an embedding tied to it; else int8 with int4, or --quant's.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Convert a Hugging Face directory or a GGUF file to a .colibri container.")
    def convert(
        source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory with config.json and safetensors, or a .gguf file.")],
        out: Annotated[Path, typer.Argument(metavar="OUT.colibri")],
        quant: Annotated[Quant, typer.Option(help="Weight format.")] = Quant.INT8,
        head: Head = None,
        upcycle: Annotated[str | None, typer.Option(help="Turn a dense model into experts, for instance pairs=4.")] = None,
        descriptor: Annotated[Path | None, typer.Option(help="A family table of your own (docs/models.md).")] = None,
        tokenizer: Annotated[str, typer.Option(help="auto (the source's), none, or a tokenizer.json.")] = "auto",
        seed: Annotated[int, typer.Option(help="Seed of --upcycle.")] = 0,
        temperature: Annotated[float | None, typer.Option(min=0.0, max=100.0, help="Default of requests; else the source's.")] = None,
        top_p: Annotated[float | None, typer.Option(min=0.001, max=1.0, help="Default of requests; else the source's.")] = None,
        force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    ) -> None:
        check_paths(source, out, force=force)
        sampling = {name: value for name, value in (("temperature", temperature), ("top_p", top_p)) if value is not None}
        with progress_bar(f"converting {source.name}", quiet=quiet) as progress:
            from ops.convert import convert as run

            report = run(
                source,
                out,
                quant=quant.value,
                head=head and head.value,
                upcycle=upcycle,
                descriptor=descriptor,
                progress=progress,
                tokenizer=tokenizer,
                seed=seed,
                sampling=sampling,
            )
        if not quiet:
            weights = f"{report.parameters / 1e6:,.1f} M parameters in {report.quant}, head in {report.head}"
            what = f"{report.family}, {weights}, {report.tensors} tensors"
            typer.echo(f"{out}: {what}, {human_bytes(report.file_bytes)} in {report.seconds:.1f} s")
        if not report.tokenizer:
            typer.echo("colibri: there is no tokenizer, so the model takes token ids only; name one with --tokenizer FILE", err=True)


def check_paths(source: Path, out: Path, *, force: bool) -> None:
    """Refuses what cannot work before any work is done."""
    if not source.exists():
        raise CommandError(f"{source} does not exist; give a Hugging Face directory or a .gguf file")
    if out.is_dir():
        raise CommandError(f"{out} is a directory; name the file to write, for instance {out / (source.stem + '.colibri')}")
    check_output(out)
    if out.exists() and not force:
        raise CommandError(f"{out} exists; remove it or add --force")


@contextmanager
def progress_bar(title: str, *, quiet: bool = False) -> Iterator[OnProgress | None]:
    """A callback (done, total, what) shown as a bar on a terminal; None when quiet or not on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[item]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, item="")
        yield lambda done, total, item: bar.update(task, completed=done, total=total, item=item)
