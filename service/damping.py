"""Damping in words: "heat", or "capacity,margin=0.5". Without protobuf, for the settings are read before anything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine_c import Damping

OFF = "off"
KINDS = (OFF, "heat", "capacity", "reuse")
SCOPES = ("sequence", "batch")
NUMBERS: Mapping[str, Callable[[str], int | float]] = {
    "threshold": int,
    "growth": float,
    "decay": float,
    "capacity_factor": float,
    "margin": float,
    "max_rerouted": float,
}
RECOMMENDED: Mapping[tuple[str, str], Mapping[str, int | float]] = {
    ("heat", "sequence"): {"growth": 1.05},
    ("heat", "batch"): {"growth": 1.15},
    ("capacity", "sequence"): {"decay": 0.95, "capacity_factor": 3.0, "margin": 0.5},
    ("reuse", "batch"): {"margin": 0.5},
}
"""By kind and scope, where the engine's own defaults are not what docs/balance.md recommends."""
_USED = {
    ("heat", "sequence"): ("threshold", "growth", "decay"),
    ("heat", "batch"): ("growth",),
    ("capacity", "sequence"): ("capacity_factor", "decay"),
    ("capacity", "batch"): ("capacity_factor",),
    ("reuse", "batch"): (),
}
"""Numbers that matter, beside margin and max_rerouted."""


class DampingError(ValueError):
    """No such damping. `name` is what is wrong: damping, scope or one of NUMBERS; `sentence` says why."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"{name} {sentence}")
        self.name = name
        self.sentence = sentence


def make_damping(kind: str, *, scope: str = "", numbers: Mapping[str, int | float]) -> Damping | None:
    """None for off. Scope "" is sequence, for reuse batch; numbers not given have the recommended values. Raises DampingError."""
    if kind not in KINDS:
        raise DampingError("damping", f"is {kind!r}; it must be one of {', '.join(KINDS)}")
    if scope and scope not in SCOPES:
        raise DampingError("scope", f"is {scope!r}; it must be one of {', '.join(SCOPES)}")
    if kind == OFF:
        return None
    if kind == "reuse" and scope == "sequence":
        raise DampingError("scope", "is sequence; reuse is about other tokens of the same step and exists in scope batch alone")
    scope = scope or ("batch" if kind == "reuse" else "sequence")
    chosen: dict[str, Any] = {"scope": scope, **RECOMMENDED.get((kind, scope), {}), **numbers}
    try:
        return Damping(kind, **chosen)  # type: ignore[arg-type]  # checked above
    except ValueError as error:
        raise _renamed(error, numbers) from error


def _renamed(error: ValueError, numbers: Mapping[str, int | float]) -> DampingError:
    """The engine's sentence is: damping NAME is VALUE, ..."""
    _, name, sentence = str(error).split(" ", 2)
    return DampingError(name, sentence) if name in numbers else DampingError("damping", str(error).removeprefix("damping "))


def parse_damping(text: str, *, scope: str = "") -> Damping | None:
    """KIND, or KIND,NAME=VALUE,... Raises DampingError."""
    kind, *settings = (word.strip() for word in text.split(","))
    numbers = dict(_parse_setting(setting) for setting in settings)
    if kind == OFF and (numbers or scope):
        raise DampingError("damping", "is off; it takes no scope and no numbers")
    damping = make_damping(kind, scope=scope, numbers=numbers)
    for name in numbers:
        if damping is not None and name not in used_numbers(damping):
            used = ", ".join(used_numbers(damping))
            raise DampingError(name, f"is without effect on {kind} of scope {damping.scope}, which has {used}; leave it out")
    return damping


def _parse_setting(setting: str) -> tuple[str, int | float]:
    name, sign, value = setting.partition("=")
    if not sign or name not in NUMBERS:
        raise DampingError("damping", f"has no setting {setting!r}; there is {', '.join(f'{known}=' for known in NUMBERS)}")
    try:
        return name, NUMBERS[name](value)
    except ValueError:
        what = "a whole number" if NUMBERS[name] is int else "a number"
        raise DampingError(name, f"is {value!r}; it must be {what}") from None


def used_numbers(damping: Damping) -> tuple[str, ...]:
    """Those of NUMBERS that its kind and scope use."""
    return (*_USED[damping.kind, damping.scope], "margin", "max_rerouted")


def describe_damping(damping: Damping | None) -> str:
    """In words, with the numbers that its kind uses."""
    if damping is None:
        return OFF
    numbers = ", ".join(f"{name} {getattr(damping, name):g}" for name in used_numbers(damping))
    return f"{damping.kind}, scope {damping.scope}, {numbers}"
