"""Recorded traffic over nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench.balance_replay import replay_recording
from ops.bench.measure import BenchError
from service.load import between
from service.recording import Header, Window, header_line, window_line
from tests.unit.service.loads import Counters

HEADER = Header(
    model="mix", layers=2, experts=4, top_k=1, expert_bytes=1 << 20, interval_seconds=1.0, started="2026-01-31T12:00:00Z"
)
HOT = [[9, 9, 1, 1], [1, 1, 1, 1]]


def recorded(path: Path, *queues: list[list[int]]) -> Path:
    windows = []
    for number, queue in enumerate(queues):
        counters = Counters.zero(HEADER.layers, HEADER.experts)
        load = between(counters.step(queue, top_k=1) if queue else counters, None, seconds=1.0)
        windows.append(Window(float(number + 1), load))
    path.write_bytes(header_line(HEADER) + b"".join(map(window_line, windows)))
    return path


def test_a_hotspot_is_spread_once_it_has_been_seen(tmp_path: Path) -> None:
    found = replay_recording(recorded(tmp_path / "r", *[HOT] * 8), nodes=[2, 4], replicas=[0, 2], window=2)
    assert (found.model, found.windows, found.seconds) == ("mix", 8, 8.0)
    two, two_copied, four, four_copied = found.rows
    assert two.even == pytest.approx((1.8 + 1) / 2)
    assert two.planned == pytest.approx((two.even + 3) / 4)
    assert two.bytes == two.moves << 20
    assert two_copied.planned <= two.planned + 1e-9
    assert four_copied.planned < four.planned == four.even


def test_a_time_without_requests_counts_for_nothing(tmp_path: Path) -> None:
    busy = replay_recording(recorded(tmp_path / "a", HOT, HOT, HOT), nodes=[2], replicas=[0], window=1)
    idle = replay_recording(recorded(tmp_path / "b", HOT, HOT, HOT, []), nodes=[2], replicas=[0], window=1)
    assert idle.rows == busy.rows


def test_it_is_shown_and_written(tmp_path: Path) -> None:
    found = replay_recording(recorded(tmp_path / "r", *[HOT] * 3), nodes=[2], replicas=[0], window=1)
    assert json.loads(found.as_json())["rows"][0]["nodes"] == 2
    assert found.table().row_count == 1


def test_what_cannot_be_replayed_is_named(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", HOT, HOT)
    with pytest.raises(BenchError, match="2 windows; more than 2 are needed"):
        replay_recording(path, nodes=[2], replicas=[0], window=2)
    with pytest.raises(BenchError, match="4 experts cannot be placed on 5 nodes"):
        replay_recording(path, nodes=[5], replicas=[0], window=1)
