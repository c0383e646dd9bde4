"""Which policies are tried, with which numbers, and how a setting is written."""

from __future__ import annotations

import itertools
from dataclasses import fields

from engine_c import Damping
from ops.bench.measure import BenchError
from service.damping import make_damping

USED = {
    ("heat", "sequence"): ("threshold", "growth", "decay", "margin", "max_rerouted"),
    ("heat", "batch"): ("growth", "margin", "max_rerouted"),
    ("capacity", "sequence"): ("capacity_factor", "decay", "margin", "max_rerouted"),
    ("capacity", "batch"): ("capacity_factor", "margin", "max_rerouted"),
    ("reuse", "batch"): ("margin", "max_rerouted"),
}
"""The numbers that count."""

_GRIDS: dict[tuple[str, str], tuple[dict[str, tuple[float, ...]], ...]] = {
    ("heat", "sequence"): (
        {"decay": (0.9,), "growth": (1.05, 1.1, 1.2, 1.4, 1.8)},
        {"decay": (0.95,), "growth": (1.1, 1.2, 1.4, 1.8)},
        {"decay": (0.9,), "growth": (1.1, 1.4), "threshold": (0,)},
    ),
    ("heat", "batch"): (
        {"growth": (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 2.0)},
        {"growth": (1.2, 1.6), "margin": (0.5, 1.0)},
        {"growth": (1.4,), "max_rerouted": (0.1, 0.2)},
    ),
    ("capacity", "sequence"): ({"decay": (0.95, 0.98), "capacity_factor": (2.0, 3.0), "margin": (0.25, 0.5, 1.0)},),
    ("capacity", "batch"): ({"capacity_factor": (1.0, 1.25, 1.5, 1.75, 2.0), "margin": (0.5, 1.0, 2.0)},),
    ("reuse", "batch"): ({"margin": (0.15, 0.3, 0.4, 0.5, 0.7, 1.0)},),
}

GROUPS = tuple(USED)
"""Every (policy, scope) there is."""


def recommended() -> list[Damping]:
    """What the service takes of each if no numbers are named."""
    dampings = (make_damping(policy, scope=scope, numbers={}) for policy, scope in GROUPS)
    return [damping for damping in dampings if damping is not None]


def sweep(policy: str, scope: str) -> list[Damping]:
    """What is tried of a policy."""
    points = [dict(zip(axes, values, strict=True)) for axes in _GRIDS[policy, scope] for values in itertools.product(*axes.values())]
    return [parse_setting(policy, scope, **numbers) for numbers in points]


def parse_setting(policy: str, scope: str, **numbers: float) -> Damping:
    """A policy with some of its numbers, the others being the engine's defaults. BenchError names what is wrong."""
    if (policy, scope) not in USED:
        raise BenchError(f"there is no {policy}/{scope}, only {', '.join(map('/'.join, USED))}")
    if strange := [name for name in numbers if name not in USED[policy, scope]]:
        raise BenchError(f"{policy}/{scope} has no {strange[0]}; it has {', '.join(USED[policy, scope])}")
    whole = {field.name for field in fields(Damping) if field.type == "int"}
    values = {name: int(value) if name in whole else value for name, value in numbers.items()}
    try:
        return Damping(policy, scope=scope, **values)  # type: ignore[arg-type]
    except ValueError as cause:
        raise BenchError(f"setting {policy}/{scope}: {cause}") from cause


def read_setting(text: str) -> Damping:
    """'capacity/batch,margin=0.5,capacity_factor=1.25'. BenchError."""
    head, *rest = text.replace(" ", "").split(",")
    policy, _, scope = head.partition("/")
    numbers = {}
    for word in rest:
        name, _, value = word.partition("=")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise BenchError(f"setting {text!r}: {word!r} is not NAME=NUMBER, as in capacity/batch,margin=0.5") from None
    return parse_setting(policy, scope or "batch", **numbers)


def write_setting(damping: Damping) -> str:
    """What read_setting reads."""
    return ",".join((f"{damping.kind}/{damping.scope}", *(f"{name}={value:g}" for name, value in numbers_of(damping).items())))


def numbers_of(damping: Damping) -> dict[str, float]:
    """Those that count."""
    return {name: getattr(damping, name) for name in USED[damping.kind, damping.scope]}
