"""`colibri bench`: measurements, each a table or with --json one object; and random-weight models to measure on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import console, container_path, human_bytes, parse_ints
from ops.commands.convert import Quant, check_paths, progress_bar
from ops.commands.logits import KvFormat

if TYPE_CHECKING:
    from ops.bench.measure import Row
    from ops.bench.steps import BenchConfig

Model = Annotated[Path, typer.Argument(metavar="MODEL.colibri")]
Workers = Annotated[int | None, typer.Option("--workers-per-node", min=0, help="Worker processes per NUMA node; 0: none.")]
Threads = Annotated[int | None, typer.Option("--threads-per-worker", min=1, help="Lanes of each worker.")]
Kv = Annotated[KvFormat, typer.Option("--kv-format", help="How keys and values are kept.")]
Samples = Annotated[int, typer.Option(min=1, help="Samples a case; the median is shown.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


def register(app: typer.Typer) -> None:
    """Adds the group of commands."""
    group = typer.Typer(help="Measure whole steps; make random-weight models.")
    group.command("make-model", help="Write a model of random weights.")(make_model)
    group.command("prefill", help="Prompt tokens a second of one stream.")(prefill)
    group.command("decode", help="Generated tokens a second of one stream, against the memory's plain reading speed.")(decode)
    group.command("batch", help="Generated tokens a second of several streams of different tokens.")(batch)
    app.add_typer(group, name="bench")


def make_model(
    out: Annotated[Path, typer.Argument(metavar="OUT.colibri")],
    shape: Annotated[str, typer.Option(help="mm, qm, tiny, or layers,hidden,heads,kv_heads,ffn,experts,top_k,vocab.")] = "mm",
    quant: Annotated[Quant, typer.Option(help="Weight format.")] = Quant.INT8,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Random weights, real layout."""
    check_paths(out.parent, out, force=force)
    from ops.bench.shapes import parse_shape
    from ops.random_model import make_model as run

    chosen = parse_shape(shape)
    with progress_bar(f"making {out.name}") as progress:
        run(out, chosen, quant=quant.value, seed=seed, progress=progress)
    typer.echo(f"{out}: {human_bytes(out.stat().st_size)}")


def prefill(
    path: Model,
    tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "512",
    workers: Workers = None,
    threads: Threads = None,
    kv_format: Kv = KvFormat.BF16,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """One row a prompt length."""
    lengths = parse_ints(tokens, option="--tokens")
    from ops.bench.steps import bench_prefill

    config = bench_config(workers, threads, kv_format, samples)
    show("prefill", path, as_json, lambda _: [bench_prefill(path, config, tokens=length) for length in lengths])


def decode(
    path: Model,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of context before the first measured one.")] = 64,
    workers: Workers = None,
    threads: Threads = None,
    kv_format: Kv = KvFormat.BF16,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """One stream."""
    from ops.bench.steps import bench_decode

    config = bench_config(workers, threads, kv_format, samples)
    show("decode", path, as_json, lambda read: [bench_decode(path, config, streams=1, prompt=prompt, read_gb_s=read)])


def batch(
    path: Model,
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams.")] = "1,4,8,16,32",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of context of each stream.")] = 64,
    workers: Workers = None,
    threads: Threads = None,
    kv_format: Kv = KvFormat.BF16,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """One row a number of streams."""
    counts = parse_ints(streams, option="--streams")
    from ops.bench.steps import bench_decode

    config = bench_config(workers, threads, kv_format, samples)
    show("batch", path, as_json, lambda read: [bench_decode(path, config, streams=n, prompt=prompt, read_gb_s=read) for n in counts])


def bench_config(workers: int | None, threads: int | None, kv_format: KvFormat, samples: int) -> BenchConfig:
    """The options that all measurements share."""
    from ops.bench.steps import BenchConfig

    return BenchConfig(workers_per_node=workers, threads_per_worker=threads, kv_format=kv_format.value, samples=samples)


def show(bench: str, path: Path, as_json: bool, run: Callable[[float], Sequence[Row]]) -> None:
    """Measures the memory, then runs the bench with that figure, then prints the report."""
    container_path(path)
    from ops.bench.bandwidth import read_bandwidth
    from ops.bench.measure import Report, describe_machine

    read = read_bandwidth()
    rows = tuple(run(read))
    report = Report(bench=bench, model=path.name, machine=describe_machine(), rows=rows, read_gb_s=read)
    if as_json:
        typer.echo(report.as_json())
    else:
        console().print(report.table())
