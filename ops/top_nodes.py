"""The expert nodes of a model, as `colibri top` draws them: a line each, of what they did since the frame before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from colibri.v1 import operator_pb2 as pb
from ops.commands.workers import holding, node_state
from service.printable import printable

MOST = 12
"""Lines of one model's nodes: those that do not compute come first, the others by name."""
_COLOURS = {"ready": "green", "connecting": "yellow", "draining": "yellow", "lost": "bold red", "refused": "red"}


@dataclass(frozen=True, slots=True)
class Done:
    """What a node did in some time. trip_ms: from when its batches were sent to their answers, all together."""

    batches: int = 0
    rows: int = 0
    trip_ms: float = 0.0

    @classmethod
    def of(cls, now: pb.RemoteNode, earlier: pb.RemoteNode | None) -> Done:
        """Between two looks; nothing without an earlier one, or if it has begun to count anew: another node has its address."""
        if earlier is None or now.batches < earlier.batches:
            return cls()
        return cls(now.batches - earlier.batches, now.rows - earlier.rows, now.round_trip_ms - earlier.round_trip_ms)


def node_lines(model: str, now: Sequence[pb.RemoteNode], earlier: Sequence[pb.RemoteNode], seconds: float) -> list[Text | Table]:
    """The nodes of a model; nothing if it has none. seconds: between the two looks."""
    ours = sorted((node for node in now if node.model == model), key=lambda node: node.state == pb.REMOTE_NODE_STATE_READY)
    if not ours:
        return []
    before = {node.address: node for node in earlier if node.model == model}
    done = [Done.of(node, before.get(node.address)) for node in ours]
    rows = sum(each.rows for each in done)
    shown = list(zip(ours, done, strict=True))[:MOST]
    lines: list[Text | Table] = [_away(node) for node, _ in shown if node.state != pb.REMOTE_NODE_STATE_READY]
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(7):
        table.add_column(no_wrap=True)
    for node, each in shown[len(lines) :]:
        table.add_row(*_cells(node, each, rows, seconds))
    more = [Text(f"  and {len(ours) - MOST} more (colibri topology has all)", style="dim")] if len(ours) > MOST else []
    return [*lines, *([table] if table.row_count else []), *more]


def height(model: str, now: Sequence[pb.RemoteNode]) -> int:
    """Lines that node_lines takes."""
    count = sum(node.model == model for node in now)
    return min(count, MOST) + (count > MOST)


def _away(node: pb.RemoteNode) -> Text:
    """One that does not compute, and why; cut off where there is no room."""
    why = "  ".join(filter(None, (f"for {node.in_state_seconds:.0f} s", _counts(node), printable(node.reason))))
    return Text("  ", no_wrap=True, overflow="ellipsis").append_text(_name(node)).append("  ").append_text(_state(node)).append(f"  {why}")


def _cells(node: pb.RemoteNode, done: Done, rows: int, seconds: float) -> list[Text]:
    """One that computes."""
    trip = f"{done.trip_ms / done.batches:.2f} ms a batch" if done.batches else "idle"
    share = f"{done.rows / rows:.0%} of rows" if rows else ""
    rate = f"{done.batches / max(seconds, 1e-9):.0f} batches/s"
    head = Text("  ").append_text(_name(node))
    return [head, _state(node), *(Text(word) for word in (holding(node), share, rate, trip, _counts(node)))]


def _name(node: pb.RemoteNode) -> Text:
    return Text(f"expert node {printable(node.name or node.address)}")


def _state(node: pb.RemoteNode) -> Text:
    state = node_state(node)
    return Text(state, style=_COLOURS.get(state, "bold red"))


def _counts(node: pb.RemoteNode) -> str:
    told = {"lost": node.losses, "hedged": node.hedges, "failed": node.failures}
    return " ".join(f"{word} {count}" for word, count in told.items() if count)
