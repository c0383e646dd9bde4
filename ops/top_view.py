"""The picture of `colibri top`: one message of WatchStats as lines of a terminal, whatever its size. Draws; asks nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from colibri.v1 import operator_pb2 as pb
from ops.commands.common import human_bytes
from ops.commands.operate import numbers, state_markup
from ops.top_experts import load_map, routing_lines
from ops.top_nodes import height as nodes_height, node_lines
from service.load_messages import read_load
from service.printable import counted, printable

_BAR = 20  # columns of a bar
_FEWEST_MAP_ROWS = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """What is drawn: a message, the machine it came from, and where that is."""

    stats: pb.WatchStatsResponse
    machine: pb.TopologyResponse
    place: str
    earlier: pb.TopologyResponse = field(default_factory=pb.TopologyResponse)  # the machine as it was
    seconds: float = 0.0  # before

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or (console.size.height if console.is_terminal else 200)
        yield from self._lines(options.max_width, height)

    def _lines(self, width: int, height: int) -> Iterator[RenderableType]:
        yield self._head()
        left = height - 2 - len(self.machine.nodes)
        for model in self.stats.models:
            left -= 6 + len(model.workers) + bool(model.operations) + nodes_height(model.model, self.machine.remote_nodes)
        for node in self.machine.nodes:
            yield _node_line(node, self.stats.models)
        for model in self.stats.models:
            placement = next((placed for placed in self.machine.placements if placed.model == model.model), None)
            yield Group(*model_lines(model, self.stats.interval_seconds, placement))
            yield from node_lines(model.model, self.machine.remote_nodes, self.earlier.remote_nodes, self.seconds)
            rows = max(_FEWEST_MAP_ROWS, left // max(1, len(self.stats.models)))
            yield from _experts(model, width=width, rows=rows)

    def _head(self) -> Text:
        stats = self.stats
        free = f"{human_bytes(self.machine.memory_available_bytes)} of {human_bytes(self.machine.memory_limit_bytes)} free"
        text = Text(f"colibri {self.place}", style="bold", no_wrap=True)
        return text.append(f"  up {_duration(stats.uptime_seconds)}  last {stats.interval_seconds:.1f} s  {free}", style="default not bold")


def model_lines(model: pb.ModelStats, seconds: float, placement: pb.Placement | None) -> list[RenderableType]:
    """A model's figures and its workers."""
    seconds = max(seconds, 1e-9)
    state = pb.ModelState.Name(model.state).removeprefix("MODEL_STATE_").lower()
    kv = model.kv_blocks_held / model.kv_blocks if model.kv_blocks else 0.0
    steps = f"{model.steps / seconds:.1f} steps/s" + (f" of {model.step_ms / model.steps:.2f} ms" if model.steps else "")
    where = f"  {placement.placement} ({placement.load_mode})" if placement is not None else ""
    lines: list[RenderableType] = [
        Text(f"{model.model}", style="bold cyan").append(f"  {state}{where}", style="default not bold"),
        Text(
            f"  {model.tokens / seconds:.1f} tokens/s  {model.rows / seconds:.1f} rows/s  {steps}"
            f"  waiting in steps {_share(model.wait_ms, model.step_ms)}  alone {_share(model.serial_ms, model.step_ms)}"
        ),
        Text.assemble(
            f"  running {model.running}  queue {model.waiting} ({model.waiting_tokens} tokens)  KV ",
            bar(kv),
            f"  lanes {model.lanes} ",
            bar(model.lanes_busy),
            f"  NUMA-local {_share(model.tasks_local, model.tasks_homed)}",
        ),
    ]
    if model.operations:
        lines.append(_operations(model))
    if model.workers:
        lines.append(_workers(model.workers, seconds))
    degraded = placement.degraded if placement is not None else ()
    return [*lines, *(Text(f"  degraded: {printable(sentence)}", style="yellow") for sentence in degraded)]


def bar(share: float, *, width: int = _BAR) -> Text:
    """A share of 1 as a bar with its per cent."""
    share = min(1.0, max(0.0, share))
    full = round(share * width)
    colour = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(("█" * full, colour), ("░" * (width - full), "dim"), f" {share:4.0%}")


def _experts(model: pb.ModelStats, *, width: int, rows: int) -> Iterator[RenderableType]:
    """What went through the routers: in the moving window that was asked for, or else since the last frame."""
    message = model.windows[0] if model.windows else model.load
    if not message.nodes:  # nothing
        return
    load = read_load(message)
    yield from routing_lines(load, message.nodes)
    yield from load_map(load, width=width, rows=rows)


def _node_line(node: pb.NumaNode, models: Sequence[pb.ModelStats]) -> Text:
    theirs = [stats for model in models for stats in model.workers if stats.worker.node == node.id]
    ready = sum(stats.worker.state == pb.WORKER_STATE_READY for stats in theirs)
    lanes = sum(len(stats.worker.lanes) for stats in theirs)
    busy = sum(stats.busy * len(stats.worker.lanes) for stats in theirs)
    cpus = numbers(node.cpus) or "none"
    text = Text(f"  NUMA node {node.id}  CPUs {cpus}  {human_bytes(node.memory_bytes)}  workers {ready}/{len(theirs)}")
    return text.append(f"  lanes {lanes} ").append_text(bar(busy / lanes)) if lanes else text


def _operations(model: pb.ModelStats) -> Text:
    """The costliest operations, as shares of the step time."""
    top = sorted(model.operations, key=lambda operation: -operation.ms)[:8]
    parts = [f"{operation.operation} {_share(operation.ms, model.step_ms)}" for operation in top if operation.ms > 0]
    return Text("  " + ("  ".join(parts) or "no step"), style="dim")


def _workers(workers: Sequence[pb.WorkerStats], seconds: float) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(8):
        table.add_column(no_wrap=True)
    for stats in workers:
        worker = stats.worker
        local = f"local {_share(worker.tasks_local, worker.tasks_homed)}" if worker.tasks_homed else ""
        table.add_row(
            f"  worker {worker.index} NUMA node {worker.node}",
            state_markup(worker.state),
            f"pid {worker.pid}" if worker.HasField("pid") else "",
            f"CPUs {numbers(worker.cpus)}" if worker.cpus else counted(len(worker.lanes), "lane"),
            bar(stats.busy, width=10),
            f"{stats.tasks / seconds:.0f} tasks/s",
            " ".join(filter(None, (local, f"restarts {worker.restarts}" if worker.restarts else ""))),
            escape(worker.error or worker.last_end),
        )
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
