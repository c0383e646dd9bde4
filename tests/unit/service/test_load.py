"""Windows and figures of how experts are used, against what they are made from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from service.load import PARTS, SPANS, Load, Windows, between, together
from tests.unit.service.loads import Counters

LAYERS, EXPERTS, TOP_K = 2, 4, 2


@st.composite
def queues(draw: st.DrawFn) -> list[list[int]]:
    """One step: every layer routes the same rows, each to TOP_K experts."""
    rows = draw(st.integers(1, 20))
    layers = []
    for _ in range(LAYERS):
        counts = [0] * EXPERTS
        for _ in range(rows):
            for expert in draw(st.permutations(range(EXPERTS)))[:TOP_K]:
                counts[expert] += 1
        layers.append(counts)
    return layers


def after(steps: list[list[list[int]]]) -> Counters:
    counters = Counters.zero(LAYERS, EXPERTS)
    for step in steps:
        counters = counters.step(step, top_k=TOP_K)
    return counters


@given(st.lists(queues(), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_figures_are_those_of_the_queues(steps: list[list[list[int]]]) -> None:
    load = between(after(steps), None, seconds=1.0)
    lengths = np.array(steps, float)  # [steps, layers, experts]
    assert not load.idle
    assert (load.layers, load.experts) == (LAYERS, EXPERTS)
    np.testing.assert_allclose(load.queue_mean, lengths.mean(axis=(0, 2)))
    np.testing.assert_allclose(load.queue_variance, lengths.var(axis=2).mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(load.longest_mean, lengths.max(axis=2).mean(axis=0))
    np.testing.assert_allclose(load.longest_variance, lengths.max(axis=2).var(axis=0), atol=1e-9)
    np.testing.assert_allclose(load.active_mean, (lengths > 0).sum(axis=2).mean(axis=0))
    np.testing.assert_allclose(load.max_over_mean, lengths.sum(axis=0).max(axis=1) / lengths.sum(axis=0).mean(axis=1))


def test_figures_of_nothing_are_no_numbers_that_alarm() -> None:
    load = between(Counters.zero(LAYERS, EXPERTS), None, seconds=1.0)
    assert load.idle
    assert load.max_over_mean.tolist() == [1.0] * LAYERS
    for figure in (load.queue_mean, load.queue_variance, load.longest_mean, load.longest_variance, load.active_mean, load.rerouted_share):
        assert figure.tolist() == [0.0] * LAYERS


def test_shares_are_of_the_tokens() -> None:
    counters = Counters.zero(1, 4).step([[4, 4, 0, 0]], top_k=2, rerouted=1, repeats=3)
    load = between(counters, None, seconds=1.0)
    assert (load.rerouted_share.tolist(), load.repeat_share.tolist()) == ([0.25], [0.75])


def test_steps_of_different_size_that_are_even_have_no_variance() -> None:
    load = between(after([[[1, 1, 1, 1]] * LAYERS, [[50, 50, 50, 50]] * LAYERS]), None, seconds=1.0)
    assert load.queue_variance.tolist() == [0.0] * LAYERS


def test_bytes_go_to_the_nodes_that_hold_them() -> None:
    load = between(after([[[3, 1, 0, 0], [2, 2, 0, 0]], [[4, 0, 0, 0], [0, 0, 2, 2]]]), None, seconds=1.0)
    left = np.array([[1, 1, 0, 0]] * LAYERS)
    assert load.bytes_by_node(100.0, {0: left, 1: 1 - left}) == {0: 250.0, 1: 100.0}
    assert load.bytes_by_node(100.0, {0: 0.5, 1: 0.5}) == {0: 175.0, 1: 175.0}
    assert load.bytes_by_node(100.0, {None: 1.0}) == {None: 350.0}


@given(st.lists(st.tuples(st.floats(0.01, 7.0), st.integers(0, 3)), min_size=1, max_size=120))
@settings(max_examples=60, deadline=None)
def test_a_window_holds_what_its_span_brought(gaps: list[tuple[float, int]]) -> None:
    windows, now, counters = Windows(), 0.0, Counters.zero(LAYERS, EXPERTS)
    history: list[tuple[float, int]] = []
    for gap, steps in gaps:
        now += gap
        for _ in range(steps):
            counters = counters.step([[2, 2, 0, 0]] * LAYERS, top_k=TOP_K)
        windows.add(now, counters)
        history.append((now, int(counters.steps[0])))
        for span in SPANS:
            load = windows.load(span)
            assert load is not None
            began = now - load.seconds
            at_start = [count for at, count in history if at <= began + 1e-9]
            assert int(load.steps[0]) == history[-1][1] - at_start[-1]
            if now - history[0][0] >= span:  # known for long enough: it is covered, by a part and a look too much at the most
                assert load.seconds >= span - 1e-9
                assert load.seconds <= span * (1 + 1 / PARTS) + max(apart for apart, _ in gaps) * 2
            else:
                assert began == pytest.approx(history[0][0])
    assert windows.kept <= len(SPANS) * (PARTS + 2)


def test_there_is_no_window_before_the_first_look() -> None:
    assert Windows().load(1.0) is None
    assert Windows().newest is None


@given(st.lists(queues(), min_size=2, max_size=6), st.data())
@settings(max_examples=30, deadline=None)
def test_loads_of_parts_add_up_to_the_whole(steps: list[list[list[int]]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(steps) - 1))
    middle, end = after(steps[:cut]), after(steps)
    parts = [between(middle, None, seconds=2.0), between(end, middle, seconds=3.0)]
    whole, sum_ = between(end, None, seconds=5.0), together(parts)
    for name in Load.__slots__:
        np.testing.assert_array_equal(getattr(whole, name), getattr(sum_, name), err_msg=name)


def test_no_load_is_no_sum() -> None:
    with pytest.raises(ValueError, match="no load"):
        together([])
