"""Load on a front end, and how fast it is answered."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from colibri.v1 import inference_pb2 as pb
from tests.fault.harness import limit, wait_for
from tests.fault.load import Answer, Load, answers_to, requests
from tests.integration.serving import serving

STREAMS = 8
CALL_S = 60
WINDOW_S = 0.5


def short_requests() -> list[pb.GenerateRequest]:
    """Such that a test can wait for those under way; local_answers() are the answers to these."""
    return requests(((1, 60), (40, 30), (150, 20), (6, 90), (20, 10), (90, 50), (3, 6), (60, 70), (12, 25), (100, 40), (2, 80)))


def local_answers(model: Path) -> list[Answer]:
    """What the model answers in one process, all by itself, to short_requests()."""
    with serving(model) as here:
        return answers_to(short_requests(), here.target, timeout=CALL_S)


@contextlib.contextmanager
def load(target: str, expected: Sequence[Answer], *, begun: bool = True) -> Iterator[Load]:
    """STREAMS streams, under way when the block begins unless told otherwise, until it ends. Whether they were answered rightly is for the
    test to say."""
    made = Load(target, expected, streams=STREAMS, timeout=CALL_S, todo=short_requests())
    made.start()
    try:
        if begun:
            flows(made)
        yield made
    finally:
        made.stop()


def flows(load: Load, *, tokens: int = 200, seconds: float = 20) -> float:
    """Waits until so many more tokens have come; returns how long that took."""
    goal = load.tokens + tokens
    return wait_for(lambda: load.tokens >= goal, seconds=limit(seconds), what=f"{tokens} more tokens come")


def speed(load: Load) -> float:
    """Tokens a second, over the time that comes."""
    begin, tokens = time.monotonic(), load.tokens
    end = begin + WINDOW_S
    wait_for(lambda: time.monotonic() >= end, seconds=limit(WINDOW_S + 5), what="time passes")
    return (load.tokens - tokens) / (time.monotonic() - begin)


def undisturbed(load: Load) -> None:
    """Nothing failed, nothing was wrong, and something was asked."""
    assert [error for stream in load.streams for error in stream.failed] == []
    right(load)


def right(load: Load) -> None:
    """Nothing was wrong, whatever failed."""
    assert [difference for stream in load.streams for difference in stream.wrong] == []
    assert sum(stream.calls for stream in load.streams) > 0
