"""Counters of routers as the engine keeps them, made from queues."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from engine_c import RUN_BUCKETS

Counts = npt.NDArray[np.uint64]


@dataclass
class Counters:
    """Of a model with so many layers and experts; nothing has been routed."""

    tokens: Counts
    active: Counts
    steps: Counts
    rows: Counts
    row_squares: Counts
    queue_squares: Counts
    queue_longest: Counts
    longest_squares: Counts
    queue_max: Counts
    active_experts: Counts
    rerouted: Counts
    repeats: Counts
    runs: Counts

    @classmethod
    def zero(cls, layers: int, experts: int) -> Counters:
        shapes = {"tokens": (layers, experts), "active": (layers, experts), "runs": (layers, RUN_BUCKETS)}
        return cls(**{field.name: np.zeros(shapes.get(field.name, (layers,)), np.uint64) for field in fields(cls)})

    def step(self, queues: list[list[int]], *, top_k: int, rerouted: int = 0, repeats: int = 0) -> Counters:
        """The counters after one more step with these queues [layers][experts]."""
        queue = np.array(queues, np.uint64)
        rows = queue.sum(axis=1) // np.uint64(top_k)
        return Counters(
            tokens=self.tokens + queue,
            active=self.active + (queue > 0),
            steps=self.steps + (rows > 0),
            rows=self.rows + rows,
            row_squares=self.row_squares + rows**2,
            queue_squares=self.queue_squares + (queue**2).sum(axis=1),
            queue_longest=self.queue_longest + queue.max(axis=1),
            longest_squares=self.longest_squares + queue.max(axis=1) ** 2,
            queue_max=np.maximum(self.queue_max, queue.max(axis=1)),
            active_experts=self.active_experts + (queue > 0).sum(axis=1).astype(np.uint64),
            rerouted=self.rerouted + np.uint64(rerouted),
            repeats=self.repeats + np.uint64(repeats),
            runs=self.runs,
        )
