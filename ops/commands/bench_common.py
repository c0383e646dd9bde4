"""What the measurements share: their options, and how a report is made and shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import ModelFile, console, container_path
from ops.commands.logits import KvFormat

if TYPE_CHECKING:
    from ops.bench.bandwidth import Meter
    from ops.bench.limits import MachineLimits
    from ops.bench.measure import Report, Row
    from ops.bench.steps import BenchConfig

Model = ModelFile
Workers = Annotated[int | None, typer.Option("--workers-per-node", min=0, help="Worker processes per NUMA node; 0: none.")]
Threads = Annotated[int | None, typer.Option("--threads-per-worker", min=1, help="Lanes of each worker.")]
Kv = Annotated[KvFormat, typer.Option("--kv-format", help="How keys and values are kept.")]
Samples = Annotated[int, typer.Option(min=1, help="Samples a case; the median is shown.")]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens of context of each stream.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


@dataclass(frozen=True, slots=True)
class Meters:
    """What a measurement is held against."""

    meter: Meter
    limits: MachineLimits


def bench_config(
    workers: int | None, threads: int | None, kv_format: KvFormat = KvFormat.BF16, samples: int = 5
) -> BenchConfig:
    """The options that most measurements share."""
    from ops.bench.steps import BenchConfig

    return BenchConfig(workers_per_node=workers, threads_per_worker=threads, kv_format=kv_format.value, samples=samples)


def measure(
    bench: str,
    path: Path | None,
    as_json: bool,
    run: Callable[[Meters], Sequence[Row]],
    *,
    config: BenchConfig | None = None,
    name: str = "this machine",
    limit_is: str = "of limit",
    notes: Sequence[str] = (),
    both: bool = False,
) -> Report:
    """Measures the machine, runs the bench with that, prints the report and returns it. `name` is what a bench without a file is of;
    `both`: with JSON on stdout the table goes to stderr."""
    if path is not None:
        container_path(path)
    import engine_c
    from ops.bench.bandwidth import Meter, lane_cores
    from ops.bench.measure import Report, describe_machine

    engine_c.isa_select(None)
    wish = (config.workers_per_node, config.threads_per_worker) if config else (None, None)
    with Meter(lane_cores(workers_per_node=wish[0], threads_per_worker=wish[1])) as meter:
        limits = meter.limits()
        rows = tuple(run(Meters(meter, limits)))
    report = Report(bench, name if path is None else path.name, describe_machine(), rows, limits, limit_is=limit_is, notes=tuple(notes))
    if as_json:
        typer.echo(report.as_json())
    if not as_json or both:
        console(stderr=as_json).print(report.shown())
    return report
