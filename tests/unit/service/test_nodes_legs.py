"""Which node runs which layers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from service.nodes.holders import Holder, Table
from service.nodes.legs import Leg, plan_legs, show_layers
from service.spans import merge_ranges, parse_ranges, show_ranges

LAYERS = 8
RANGE = st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS)).map(lambda r: (r[0], max(r[0] + 1, r[1])))
HOLDERS = st.lists(st.lists(RANGE, max_size=2).map(merge_ranges), max_size=4)


def holders(ranges: list[tuple[tuple[int, int], ...]], first_key: int = 10) -> list[Holder]:
    return [Holder(first_key + i, f"n{i}", frozenset(), own) for i, own in enumerate(ranges)]


def covered(legs: tuple[Leg, ...]) -> set[int]:
    return {layer for leg in legs for layer in range(leg.first, leg.end)}


def check(legs: tuple[Leg, ...], there: list[Holder]) -> None:
    """They ascend, are apart, within what their nodes run, and cover all that any node runs."""
    assert all(a.end <= b.first for a, b in pairwise(legs))
    ranges = {holder.key: holder.ranges for holder in there}
    assert all(any(first <= leg.first < leg.end <= end for first, end in ranges[leg.key]) for leg in legs)
    assert covered(legs) == Table.of(there, layers=LAYERS, experts=1).ranged


@given(HOLDERS)
def test_all_that_nodes_run_is_covered_once(ranges: list[tuple[tuple[int, int], ...]]) -> None:
    check(plan_legs(holders(ranges), LAYERS), holders(ranges))


@given(HOLDERS, HOLDERS)
def test_legs_whose_stream_is_there_stay_and_the_rest_is_covered_anew(
    before: list[tuple[tuple[int, int], ...]], joined: list[tuple[tuple[int, int], ...]]
) -> None:
    first = plan_legs(holders(before), LAYERS)
    there = [*holders(before)[1:], *holders(joined, first_key=20)]
    second = plan_legs(there, LAYERS, kept=first)
    check(second, there)
    assert {leg for leg in first if leg.key != 10} <= set(second)
    assert plan_legs(there, LAYERS, kept=second) == second


def test_two_halves_are_two_hops_and_a_replica_changes_nothing() -> None:
    halves = holders([((0, 4),), ((4, 8),)])
    legs = plan_legs(halves, LAYERS)
    assert legs == (Leg(0, 4, 10), Leg(4, 8, 11))
    replica = Holder(30, "a", frozenset(), ((0, 8),))
    assert plan_legs([replica, *halves], LAYERS, kept=legs) == legs
    assert plan_legs([replica, *halves], LAYERS) == (Leg(0, 8, 30),)
    assert plan_legs([replica, halves[1]], LAYERS, kept=legs) == (Leg(0, 4, 30), Leg(4, 8, 11))


@given(st.sets(st.integers(0, 40), min_size=1))
def test_what_is_shown_means_the_same_when_read(layers: set[int]) -> None:
    ranges = parse_ranges(show_layers(layers))
    assert {layer for first, end in ranges for layer in range(first, end)} == layers
    assert parse_ranges(show_ranges(ranges)) == ranges


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "0,,2", "0x1"])
def test_senseless_spans_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number nor a span"):
        parse_ranges(text)


def test_a_span_the_wrong_way_round_is_said_to_be() -> None:
    with pytest.raises(ValueError, match="3-1 is the wrong way round, 1-3 is meant"):
        parse_ranges("0,3-1")
