"""Recorded traffic of a service, replayed over numbers of nodes: what the planner's placements would have done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ops.bench.balance_nodes import Replay, replay
from ops.bench.measure import BenchError
from service.recording import read_recording

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class RecordingReplay:
    """What came of one recording."""

    model: str
    seconds: float
    windows: int
    rows: tuple[Replay, ...]

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))

    def table(self) -> Table:
        """For people."""
        from rich import box
        from rich.table import Table

        title = f"balance-replay: {self.model}, {self.windows} windows, {self.seconds:.0f} s; max/mean of the nodes' work"
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for heading in ("nodes", "replicas a layer", "even", "planned", "moves", "MiB moved"):
            table.add_column(heading, justify="right")
        for row in self.rows:
            cells = (row.nodes, row.replicas, f"{row.even:.3f}", f"{row.planned:.3f}", row.moves, f"{row.bytes / 2**20:.0f}")
            table.add_row(*map(str, cells))
        return table


def replay_recording(path: Path, *, nodes: Sequence[int], replicas: Sequence[int], window: int) -> RecordingReplay:
    """A row each number of nodes and replicas. RecordingError; BenchError if there is too little to plan from."""
    recording = read_recording(path)
    experts = recording.header.experts
    if bad := [count for count in nodes if not 1 < count <= experts]:
        raise BenchError(f"{experts} experts cannot be placed on {bad[0]} nodes: from 2 to {experts} are possible")
    if len(recording.windows) <= window:
        raise BenchError(f"{path} has {len(recording.windows)} windows; more than {window} are needed to plan and to see what came of it")
    loads = np.stack([one.load.tokens for one in recording.windows]).astype(np.int64)
    size = recording.header.expert_bytes
    rows = tuple(replay(loads, nodes=n, expert_bytes=size, window=window, replicas=copies) for n in nodes for copies in replicas)
    return RecordingReplay(recording.header.model, recording.windows[-1].at, len(recording.windows), rows)
