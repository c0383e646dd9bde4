"""What goes in and comes out about the choice of experts: damping, routes, telemetry. Field names and meanings are colibri.h's."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Kind = Literal["heat", "capacity", "reuse"]
Scope = Literal["sequence", "batch"]

KINDS: dict[str, int] = {"heat": 1, "capacity": 2, "reuse": 3}
SCOPES: dict[str, int] = {"sequence": 0, "batch": 1}
RUN_BUCKETS = 8

_LIMITS: dict[str, tuple[float, float]] = {
    "threshold": (0, 1e6),
    "growth": (1, 1000),
    "decay": (0, 1),
    "capacity_factor": (1, 1e6),
    "margin": (0, 1e6),
    "max_rerouted": (0, 1),
}


@dataclass(frozen=True, slots=True)
class Damping:
    """How experts that get too many tokens are relieved (colibri_damping). ValueError names the field that is out of range."""

    kind: Kind
    _: KW_ONLY
    scope: Scope = "batch"
    threshold: int = 3
    growth: float = 1.2
    decay: float = 0.9
    capacity_factor: float = 1.5
    margin: float = 2.0
    max_rerouted: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"damping kind {self.kind!r} is unknown; there are {', '.join(KINDS)}")
        if self.scope not in SCOPES:
            raise ValueError(f"damping scope {self.scope!r} is unknown; there are {', '.join(SCOPES)}")
        if self.kind == "reuse" and self.scope != "batch":
            raise ValueError("damping scope must be 'batch' for kind 'reuse': a sequence alone has no experts in use")
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"damping {name} is {value}, it must be {low:g} to {high:g}")

    def as_tuple(self) -> tuple[float | int, ...]:
        """In the order of the C struct."""
        numbers = self.threshold, self.growth, self.decay, self.capacity_factor, self.margin, self.max_rerouted
        return KINDS[self.kind], SCOPES[self.scope], *numbers


@dataclass(frozen=True, slots=True)
class Routes:
    """Where a sequence's rows of one step went, by layers that have a router."""

    experts: npt.NDArray[np.int32]
    """[layers, rows, k] by descending undamped score."""
    weights: npt.NDArray[np.float32]
    """[layers, rows, k]."""
    margins: npt.NDArray[np.float32]
    """[layers, rows] undamped selection score of the k-th expert less the next one's: inf if all experts are chosen, nan for a bad row."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Counts since the session was opened (colibri_telemetry), uint64. A queue is the tokens an expert gets in one step."""

    tokens: npt.NDArray[np.uint64]
    """[layers, experts]."""
    active: npt.NDArray[np.uint64]
    """[layers, experts] steps in which the expert had a token."""
    steps: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]
    row_squares: npt.NDArray[np.uint64]
    """[layers], as all that follow but runs: sum over steps of the number of rows squared."""
    queue_squares: npt.NDArray[np.uint64]
    """Sum over steps and experts of the queue's length squared."""
    queue_longest: npt.NDArray[np.uint64]
    """Sum over steps of the longest queue's length."""
    longest_squares: npt.NDArray[np.uint64]
    """Sum over steps of that squared."""
    queue_max: npt.NDArray[np.uint64]
    active_experts: npt.NDArray[np.uint64]
    """Sum over steps of experts that had a token."""
    rerouted: npt.NDArray[np.uint64]
    repeats: npt.NDArray[np.uint64]
    """Rows of sequences with a slot whose first expert is that of the token before."""
    runs: npt.NDArray[np.uint64]
    """[layers, RUN_BUCKETS] ended runs of one first expert; bucket b: lengths 2^b to 2^(b+1) - 1, the last all above."""


def empty_telemetry(layers: int, experts: int) -> Telemetry:
    """Zeros of the right shapes."""
    import numpy as np

    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(Telemetry.__slots__, (layers,))
    shapes |= {"tokens": (layers, experts), "active": (layers, experts), "runs": (layers, RUN_BUCKETS)}
    return Telemetry(**{name: np.zeros(shape, np.uint64) for name, shape in shapes.items()})
