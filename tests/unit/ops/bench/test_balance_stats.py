"""Statistics of a judgement, against figures worked out by hand and against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ops.bench.balance_stats import change, perplexity, queue_stats, queues, relative


def test_queues_count_the_rows_of_each_expert() -> None:
    routes = np.array([[[[0, 1], [0, 2]], [[3, 1], [3, 1]]]])  # one step, two layers, two rows, two experts a row
    assert queues(routes, count=4).tolist() == [[[2, 1, 1, 0], [0, 2, 0, 2]]]


def test_queues_agree_with_a_loop() -> None:
    routes = np.random.default_rng(1).integers(0, 7, (5, 3, 11, 2))
    found = queues(routes, count=7)
    for step in range(5):
        for layer in range(3):
            assert found[step, layer].tolist() == [int((routes[step, layer] == expert).sum()) for expert in range(7)]


def test_even_queues_have_no_variance() -> None:
    stats = queue_stats(np.full((3, 2, 4), 5, np.int32))
    assert (stats.mean, stats.variance, stats.longest, stats.longest_variance, stats.longest_most, stats.active) == (5, 0, 5, 0, 5, 4)


def test_variances_are_those_within_a_layer() -> None:
    lengths = np.array([[[4, 0], [2, 2]], [[0, 4], [2, 2]], [[2, 2], [2, 2]]], np.int32)  # three steps, two layers, two experts
    stats = queue_stats(lengths)
    assert stats.variance == pytest.approx((4 + 4 + 4 + 4) / 12)
    assert stats.longest == pytest.approx((4 + 4 + 2 + 6) / 6)
    assert stats.longest_variance == pytest.approx((8 / 9 + 0) / 2)
    assert stats.longest_most == 4
    assert stats.active == pytest.approx((1 + 1 + 2 + 6) / 6)


def test_the_change_of_perplexity_is_that_of_the_two() -> None:
    random = np.random.default_rng(2)
    before, after = -random.random((40, 4)), -random.random((40, 4))
    found = change(after, before, np.arange(160).reshape(40, 4) // 20)
    assert found.share == pytest.approx(perplexity(after) / perplexity(before) - 1)
    assert change(before, before, np.zeros_like(before, np.int32)).share == 0


def test_the_error_covers_what_new_samples_give() -> None:
    """Of 400 samples of groups of dependent tokens the estimates scatter as the mean of their errors says."""
    random = np.random.default_rng(3)
    groups = np.repeat(np.arange(50), 20)
    estimates, errors = [], []
    for _ in range(400):
        apart = 0.05 * np.repeat(random.standard_normal(50), 20) + 0.1 * random.standard_normal(1000)
        found = change(-apart, np.zeros(1000), groups)
        estimates.append(found.share)
        errors.append(found.error)
    assert np.std(estimates) == pytest.approx(np.mean(errors), rel=0.12)


def test_one_group_has_no_known_error() -> None:
    assert math.isnan(change(np.array([-1.0, -2.0]), np.array([-1.0, -1.0]), np.array([0, 0])).error)


def test_nothing_is_not_larger_than_nothing() -> None:
    assert relative(0.0, 0.0) == 0
    assert relative(3.0, 2.0) == 0.5
