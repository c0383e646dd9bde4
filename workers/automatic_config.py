"""How a team rebalances itself. Apart from what does it, which most servers never need and none needs to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Loads = Sequence[Sequence[float]]
"""What experts had to do [layers][experts]."""

MIN_GAIN = 0.05
"""Less than this share of the experts' time is not worth a change."""


@dataclass(frozen=True, slots=True)
class Automatic:
    """How a team rebalances itself. replicas: None leaves them to who moves experts. loads: the tokens each expert has had since some
    beginning [layers][experts]; None: as the session counts them."""

    interval_s: float = 30.0
    min_gain: float = MIN_GAIN
    replicas: int | None = 0
    loads: Callable[[], Loads] | None = None
