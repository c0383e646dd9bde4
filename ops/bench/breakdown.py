"""Where a token's time goes between the engine alone and a gRPC client. Pure.

All figures are microseconds of one token of the whole service (one second holds as many as tokens were given out). Wall time splits without
rest: a served step, and what lies between two. CPU time overlaps with steps wherever there are as many lanes as cores, and is what makes a
served step longer than the engine's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ops.bench.measure import BenchError, Row


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU microseconds of one token, measured by themselves."""

    detokenise: float
    message: float  # from a step's news to bytes, detokenising not included


@dataclass(frozen=True, slots=True)
class Window:
    """What the server did while all streams ran. `totals`: differences of its counters; `cpu`: seconds by who spent them."""

    seconds: float
    totals: dict[str, float]
    cpu: dict[str, float]


@dataclass(frozen=True, slots=True)
class Parts:
    """Microseconds a token."""

    wall: float
    times: dict[str, float]  # add up to wall
    cpu: dict[str, float]


def break_down(window: Window, own: Row, costs: Costs) -> Parts:
    """`own` is the engine's row of the same streams: median tokens/s, and "python" its share of time outside of steps."""
    tokens = window.totals["rows"]
    wall, step = 1e6 * window.seconds / tokens, 1e6 * window.totals["step_seconds"] / tokens
    own_wall = 1e6 / own.median
    scheduling = own_wall * own.details["python"]
    times = {
        "step, as the engine alone": own_wall - scheduling,
        "step, longer beside gRPC": step - (own_wall - scheduling),
        "scheduling": scheduling,
        "wake-ups and waiting for Python": wall - step - scheduling,
    }
    cpu = {name: 1e6 * seconds / tokens for name, seconds in window.cpu.items()}
    known = costs.detokenise + costs.message
    rest = cpu.pop("loop") - known
    cpu |= {"detokenise": costs.detokenise, "make and serialise message": costs.message}
    cpu["asyncio, the rest of the loop"] = rest
    return Parts(wall, times, cpu)


def window_of(streams: Sequence[Sequence[tuple[float, int]]]) -> tuple[float, float]:
    """From when every stream has had a token to when the first has had its last. BenchError if that is nothing."""
    begin, end = max(stream[0][0] for stream in streams), min(stream[-1][0] for stream in streams)
    if end <= begin:
        raise BenchError("the streams never ran all at once; give longer answers")
    return begin, end


def rates(streams: Sequence[Sequence[tuple[float, int]]], window: tuple[float, float], parts: int) -> tuple[float, ...]:
    """Tokens a second of all streams together in equal parts of the window; parts of few steps scatter."""
    begin, end = window
    width = (end - begin) / parts
    counts = [0] * parts
    edges = [begin + width * (index + 1) for index in range(parts - 1)]
    for stream in streams:
        for at, tokens in stream:
            if begin < at <= end:
                counts[bisect_right(edges, at)] += tokens
    return tuple(count / width for count in counts)
