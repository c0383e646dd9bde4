"""Where a served token's time goes."""

from __future__ import annotations

import pytest

from ops.bench.breakdown import Costs, Window, break_down, rates, window_of
from ops.bench.measure import BenchError, Row


def test_wall_time_splits_without_rest() -> None:
    own = Row("engine", "tokens/s", (1000.0,), {"python": 0.1})
    window = Window(2.0, {"rows": 1600.0, "step_seconds": 1.6}, {"loop": 0.4, "engine": 1.6, "grpc": 0.08, "workers": 1.2, "clients": 0.16})
    parts = break_down(window, own, Costs(detokenise=10.0, message=25.0))
    assert parts.wall == pytest.approx(1250)
    assert parts.times == pytest.approx(
        {"step, as the engine alone": 900, "step, longer beside gRPC": 100, "scheduling": 100, "wake-ups and waiting for Python": 150}
    )
    assert sum(parts.times.values()) == pytest.approx(parts.wall)
    assert parts.cpu["asyncio, the rest of the loop"] == pytest.approx(250 - 35)
    assert parts.cpu["detokenise"] == 10.0
    assert parts.cpu["clients"] == pytest.approx(100)
    assert "loop" not in parts.cpu


def test_the_window_is_where_all_streams_run() -> None:
    streams = [[(0.0, 1), (2.0, 1), (5.0, 1)], [(1.0, 1), (3.0, 1), (4.0, 1)]]
    assert window_of(streams) == (1.0, 4.0)
    with pytest.raises(BenchError, match="longer answers"):
        window_of([[(0.0, 1), (1.0, 1)], [(2.0, 1), (3.0, 1)]])


def test_rates_count_tokens_of_all_streams_behind_the_begin_in_equal_parts() -> None:
    streams = [[(0.0, 1), (1.0, 2), (3.0, 4), (9.0, 9)], [(0.5, 1), (2.0, 3), (4.0, 1)]]
    assert rates(streams, (0.0, 4.0), 2) == (1.5, 4.0)
