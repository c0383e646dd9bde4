"""When a server may call itself ready."""

from __future__ import annotations

import pytest

from service.engine import Progress
from service.health import can_serve


@pytest.mark.parametrize(
    ("progress", "anyone", "ready"),
    [
        (Progress(alive=True), True, True),
        (Progress(alive=False), True, False),
        (Progress(alive=True), False, False),
        (Progress(alive=True, lanes_gone=True, busy_since=99.0), True, False),
        (Progress(alive=True, lanes_gone=True), True, True),  # that was the last step's; somebody has come since
        (Progress(alive=True, busy_since=95.0), True, True),
        (Progress(alive=True, busy_since=89.0), True, False),
    ],
)
def test_readiness_is_judged_by_what_the_engine_does(progress: Progress, anyone: bool, ready: bool) -> None:
    assert can_serve(progress, now=100.0, stall_after=10.0, anyone_computes=anyone) is ready
