"""Replaying traffic over placements."""

from __future__ import annotations

import numpy as np
import pytest

from ops.bench.balance_nodes import even_placing, ratios, replay


def test_even_placing_gives_every_node_as_many_experts() -> None:
    for layer in even_placing(3, 8, 4):
        assert sorted(at[0] for at in layer) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert even_placing(2, 4, 2)[1] == [(1,), (1,), (0,), (0,)]


def test_ratios_are_the_fullest_node_s_work_over_the_mean() -> None:
    loads = np.array([[[3, 1, 0, 0]], [[1, 1, 1, 1]], [[0, 0, 0, 0]]])
    found = ratios(loads, [[(0,), (0,), (1,), (1,)]], 2)
    assert found[:2].tolist() == [[2.0], [1.0]]
    assert np.isnan(found[2, 0])


def test_a_copied_expert_s_work_goes_where_least_is_to_be_done() -> None:
    loads = np.array([[[4, 2, 0, 0]], [[2, 4, 0, 0]]])
    found = ratios(loads, [[(0, 1), (0,), (1,), (1,)]], 2)
    assert found[:, 0].tolist() == pytest.approx([1.0, 4 / 3])


def test_a_steady_hotspot_is_spread_from_the_second_window_on() -> None:
    loads = np.tile(np.array([[[8, 8, 0, 0, 1, 1, 1, 1]]]), (40, 1, 1))
    found = replay(loads, nodes=2, expert_bytes=1 << 20, window=10)
    assert found.even == pytest.approx(1.6)
    assert found.planned == pytest.approx((1.6 + 3 * 1.0) / 4)
    assert found.bytes == found.moves << 20 > 0


def test_a_hotspot_of_one_expert_takes_a_copy() -> None:
    loads = np.tile(np.array([[[12, 1, 1, 2]]]), (40, 1, 1))
    alone = replay(loads, nodes=2, expert_bytes=1 << 20, window=10)
    copied = replay(loads, nodes=2, expert_bytes=1 << 20, window=10, replicas=1)
    assert alone.planned > 1.5 - 1e-9
    assert copied.planned == pytest.approx((copied.even + 3) / 4)


def test_traffic_that_stays_even_moves_nothing() -> None:
    found = replay(np.full((30, 2, 8), 2), nodes=4, expert_bytes=1 << 20, window=10, replicas=2)
    assert (found.even, found.planned, found.moves, found.bytes) == (1, 1, 0, 0)


def test_no_traffic_is_even() -> None:
    assert replay(np.zeros((4, 1, 4), np.int64), nodes=2, expert_bytes=1, window=2).planned == 1.0
