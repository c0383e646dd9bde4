"""Which policies are tried, with which numbers, and how a setting is written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields

from engine_c import Damping
from ops.bench.measure import BenchError

GROUPS = (("heat", "sequence"), ("heat", "batch"), ("capacity", "sequence"), ("capacity", "batch"), ("reuse", "batch"))
"""Every (policy, scope) there is."""

USED = {
    "heat": ("threshold", "growth", "decay", "margin", "max_rerouted"),
    "capacity": ("capacity_factor", "decay", "margin", "max_rerouted"),
    "reuse": ("margin", "max_rerouted"),
}
"""The numbers each policy looks at. capacity looks at decay in scope sequence only."""

_MARGINS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)


RECOMMENDED = (
    Damping("heat", scope="sequence", margin=1.0),
    Damping("capacity", scope="batch", margin=1.0),
    Damping("reuse", scope="batch", margin=1.0),
)
"""What the speed is measured of if nothing else is asked for."""


def sweep(policy: str, scope: str) -> list[Damping]:
    """What is tried of a policy."""
    return [parse_setting(policy, scope, **numbers) for numbers in _grid(policy, scope)]


def _grid(policy: str, scope: str) -> Iterator[dict[str, float]]:
    if policy == "heat":
        axes = {"margin": _MARGINS, "decay": (0.5, 0.8), "max_rerouted": (0.1, 0.25, 1.0)}
    elif policy == "capacity" and scope == "sequence":
        axes = {"margin": _MARGINS, "capacity_factor": (1.25, 1.5, 2.0, 3.0), "decay": (0.5, 0.9)}
    elif policy == "capacity":
        axes = {"margin": _MARGINS, "capacity_factor": (1.0, 1.25, 1.5, 2.0), "max_rerouted": (0.1, 0.25, 1.0)}
    else:
        axes = {"margin": _MARGINS, "max_rerouted": (0.1, 0.25, 0.5, 1.0)}
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def parse_setting(policy: str, scope: str, **numbers: float) -> Damping:
    """A policy with some of its numbers, the others being the engine's defaults. BenchError names what is wrong."""
    types = {field.name: int if field.type == "int" else float for field in fields(Damping)}
    for name in numbers:
        if name not in USED.get(policy, (name,)):
            raise BenchError(f"{policy} has no {name}; it has {', '.join(USED[policy])}")
    try:
        return Damping(policy, scope=scope, **{name: types[name](value) for name, value in numbers.items()})  # type: ignore[arg-type]
    except (ValueError, KeyError) as cause:
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
    """Those its policy looks at."""
    unused = {"decay"} if (damping.kind, damping.scope) == ("capacity", "batch") else set()
    return {name: getattr(damping, name) for name in USED[damping.kind] if name not in unused}
