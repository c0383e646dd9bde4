"""How a model's experts are used: what the engine's counters say of an interval, moving windows of it, and the figures that follow.

A queue is the tokens that one expert gets in one step. Counters are read without stopping the engine: those of a step that is under way may
be in one of them and not yet in another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a start need not wait for it
    import numpy as np
    import numpy.typing as npt

    Counts = npt.NDArray[np.uint64]
    Shares = npt.NDArray[np.float64]

SPANS = (1.0, 10.0, 60.0)
"""Seconds of the moving windows."""
PARTS = 16
"""A window moves on in this many parts, and covers up to one part more than its span."""
EXPERT_COUNTS = ("tokens", "active")
LAYER_COUNTS = (
    "steps",
    "rows",
    "row_squares",
    "queue_squares",
    "queue_longest",
    "longest_squares",
    "queue_max",
    "active_experts",
    "rerouted",
    "repeats",
)
COUNTS = (*EXPERT_COUNTS, *LAYER_COUNTS, "runs")
_NO_SUM = frozenset({"queue_max"})


class Counters(Protocol):
    """Counters since the model was loaded (engine_c.Telemetry), under the names and with the shapes that Load has."""

    @property
    def tokens(self) -> Counts: ...
    @property
    def active(self) -> Counts: ...
    @property
    def steps(self) -> Counts: ...
    @property
    def rows(self) -> Counts: ...
    @property
    def row_squares(self) -> Counts: ...
    @property
    def queue_squares(self) -> Counts: ...
    @property
    def queue_longest(self) -> Counts: ...
    @property
    def longest_squares(self) -> Counts: ...
    @property
    def queue_max(self) -> Counts: ...
    @property
    def active_experts(self) -> Counts: ...
    @property
    def rerouted(self) -> Counts: ...
    @property
    def repeats(self) -> Counts: ...
    @property
    def runs(self) -> Counts: ...


@dataclass(frozen=True, slots=True)
class Load:
    """What went through the routers in an interval."""

    seconds: float
    tokens: Counts  # [layers, experts]
    active: Counts  # [layers, experts]: steps in which the expert had a token
    # All others are [layers]:
    steps: Counts  # steps in which tokens went through the layer
    rows: Counts  # tokens that did
    row_squares: Counts  # sum over the steps of their squared tokens
    queue_squares: Counts  # sum of all squared queues
    queue_longest: Counts  # sum over the steps of the longest queue
    longest_squares: Counts  # sum over the steps of that squared
    queue_max: Counts  # the longest queue since the model was loaded
    active_experts: Counts  # sum over the steps of the experts that had a token
    rerouted: Counts  # tokens whose experts damping changed
    repeats: Counts  # tokens whose first expert is that of the token before in the same sequence
    runs: Counts  # [layers, RUN_BUCKETS]: runs of such tokens by length, in powers of two

    @property
    def layers(self) -> int:
        """Of the model."""
        return int(self.tokens.shape[0])

    @property
    def experts(self) -> int:
        """Of each layer."""
        return int(self.tokens.shape[1])

    @property
    def idle(self) -> bool:
        """Whether nothing was routed."""
        return not (self.steps.any() or self.tokens.any())

    @property
    def max_over_mean(self) -> Shares:
        """[layers] tokens of the busiest expert over the mean; 1 where there were none."""
        return _over(self.tokens.max(axis=1), self.tokens.mean(axis=1), empty=1.0)

    @property
    def queue_mean(self) -> Shares:
        """[layers] mean queue over all experts and steps."""
        return _over(self.tokens.sum(axis=1), self.steps * self.experts)

    @property
    def queue_variance(self) -> Shares:
        """[layers] mean over the steps of the variance of the experts' queues in a step: what steps of different size add is not in it."""
        import numpy as np

        per_row = _over(self.tokens.sum(axis=1), self.rows)
        even = per_row**2 * self.row_squares / self.experts  # the sum of squares, had every step been even
        return np.maximum(0.0, _over(self.queue_squares - even, self.steps * self.experts))

    @property
    def longest_mean(self) -> Shares:
        """[layers] mean over the steps of the longest queue."""
        return _over(self.queue_longest, self.steps)

    @property
    def longest_variance(self) -> Shares:
        """[layers] variance over the steps of the longest queue; steps of different size add to it."""
        import numpy as np

        return np.maximum(0.0, _over(self.longest_squares, self.steps) - self.longest_mean**2)

    @property
    def active_mean(self) -> Shares:
        """[layers] experts that have a token in a step, on average."""
        return _over(self.active_experts, self.steps)

    @property
    def rerouted_share(self) -> Shares:
        """[layers] of the tokens."""
        return _over(self.rerouted, self.rows)

    @property
    def repeat_share(self) -> Shares:
        """[layers] of the tokens."""
        return _over(self.repeats, self.rows)

    def bytes_by_node(self, expert_bytes: float, parts: Mapping[int | None, Shares | float]) -> dict[int | None, float]:
        """Bytes of experts' weights read in a step, by node, if each is read once. parts: what part of each expert lies on a node,
        [layers, experts] or the same for all."""
        a_step = _over(self.active.T, self.steps).T * expert_bytes  # [layers, experts]
        return {node: float((a_step * part).sum()) for node, part in parts.items()}


def between(now: Counters, before: Counters | None, *, seconds: float) -> Load:
    """The load from one look at the counters to another; without one before, since the model was loaded."""
    found = {name: getattr(now, name) for name in COUNTS}
    if before is not None:
        found |= {name: found[name] - getattr(before, name) for name in COUNTS if name not in _NO_SUM}
    return Load(seconds=seconds, **found)


def together(loads: Sequence[Load]) -> Load:
    """One after the other as one; ValueError if there are none."""
    if not loads:
        raise ValueError("no load to add up")
    sums = {name: sum((getattr(load, name) for load in loads[1:]), getattr(loads[0], name)) for name in COUNTS if name not in _NO_SUM}
    return Load(seconds=sum(load.seconds for load in loads), queue_max=loads[-1].queue_max, **sums)


def _over(part: Counts | Shares, whole: Counts | Shares, *, empty: float = 0.0) -> Shares:
    """Quotients; `empty` where there is nothing to divide by."""
    import numpy as np

    quotients: Shares = np.full(part.shape, empty)
    return np.divide(part, whole, out=quotients, where=whole > 0)


class Windows:
    """The last SPANS of a model, from looks at its counters: a few tens of them are kept. Any thread."""

    def __init__(self, spans: Sequence[float] = SPANS) -> None:
        self.spans = tuple(spans)
        self._kept: dict[float, deque[tuple[float, Counters]]] = {span: deque() for span in self.spans}
        self._newest: tuple[float, Counters] | None = None
        self._lock = threading.Lock()

    def add(self, now: float, counters: Counters) -> None:
        """A look at a moment, later than the last."""
        with self._lock:
            self._newest = (now, counters)
            for span, kept in self._kept.items():
                if not kept or now - kept[-1][0] >= span / PARTS:
                    kept.append(self._newest)
                while len(kept) > 1 and kept[1][0] <= now - span:
                    kept.popleft()

    def load(self, span: float) -> Load | None:
        """What the last `span` seconds, one of `spans`, brought, or all that is known if that is less. None before the first look."""
        with self._lock:
            if self._newest is None:
                return None
            (now, counters), (then, before) = self._newest, self._kept[span][0]
        return between(counters, before, seconds=now - then)

    @property
    def newest(self) -> Counters | None:
        """The last look."""
        return self._newest[1] if self._newest is not None else None

    @property
    def kept(self) -> int:
        """Looks that are kept."""
        return sum(map(len, self._kept.values()))
