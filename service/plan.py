"""What goes into the scheduler and comes out of it: limits, plans of steps, news of requests, numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_c import Routes, RowResult, SeqWork
from service.blocks import PoolStats
from service.faults import Fault
from service.request import Reason, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and the queue may hold. `max_rows`, `max_seqs` and `max_logit_rows` are the engine session's."""

    max_rows: int
    max_seqs: int
    max_logit_rows: int
    max_queue: int  # requests waiting
    max_queue_tokens: int  # prompt tokens of all requests waiting
    prefill_seconds: float = 0.0  # what the prefills of a step may take while answers are decoding; 0: no limit but max_rows
    max_slots: int = 0  # the engine session's; 0: no routing state, and no damping of scope sequence
    router_layers: int = 0  # of the model

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_seqs", "max_logit_rows", "max_queue", "max_queue_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_rows < self.max_seqs or self.max_logit_rows < self.max_seqs:
            raise ValueError(f"max_rows {self.max_rows} and max_logit_rows {self.max_logit_rows} must be at least max_seqs {self.max_seqs}")
        if 0 < self.max_slots < self.max_seqs:
            raise ValueError(f"max_slots {self.max_slots} must be 0 or at least max_seqs {self.max_seqs}")


@dataclass(slots=True)
class Share:
    """A request's part of a step."""

    request: Request
    work: SeqWork


@dataclass(slots=True)
class Plan:
    """A step to run. Hand it back through exactly one of complete, fail and revert."""

    shares: list[Share]
    at: float
    work: list[SeqWork] = field(init=False)  # what the engine is given
    rows: int = field(init=False)  # tokens of the step

    def __post_init__(self) -> None:
        self.work = [share.work for share in self.shares]
        self.rows = sum([len(work.tokens) for work in self.work])


@dataclass(slots=True)
class Update:
    """News of one request: rows or routes it produced, and whether that was the end of it."""

    request: Request
    rows: Sequence[RowResult] = ()
    reason: Reason | None = None
    fault: Fault | None = None
    routes: Routes | None = None
    start: int = 0  # position of the first of rows or routes, if there is one for every token

    @property
    def final(self) -> bool:
        """Nothing more will come."""
        return self.reason is not None or self.fault is not None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot."""

    running: int
    waiting: int
    waiting_tokens: int
    preemptions: int
    prefill_rate: float  # rows a second; 0 while unknown
    pool: PoolStats
    rerouted_pairs: int = 0  # (token, layer) pairs that damping changed so far,
    damped_pairs: int = 0  # of so many that it looked at
