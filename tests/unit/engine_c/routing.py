"""Routing on each instruction set of this CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_c import Routed, Router, isa_available, isa_select, route_logits

F32: TypeAlias = NDArray[np.float32]


def f32(values: Any) -> F32:
    return np.asarray(values, np.float32)


def isas_in_turn(case: int) -> tuple[str, ...]:
    """The best instruction set, and of the others one after the other."""
    best, *others = isa_available()
    return (best, others[case % len(others)]) if others else (best,)


def route_on(isas: Sequence[str], router: Router, z: F32, **vectors: F32 | None) -> Routed:
    """The same bits from all."""
    found = []
    for isa in isas:
        isa_select(isa)
        found.append(route_logits(router, z, **vectors))
    for isa, other in zip(isas[1:], found[1:], strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found[0], other, strict=True)), f"{isa} differs from {isas[0]}: {router}"
    return found[0]
