"""Plans of where experts lie: never worse, near the best there is, within every bound, and not made when they would not pay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings, strategies as st

from workers.balance import ONE_NODE, BalancePlan, plan_balance

FREE = {"min_gain": 0.0, "bytes_per_s": 1e30}
"""Moving costs nothing, so the best packing is what is asked for."""


@dataclass(frozen=True)
class Case:
    nodes: list[int]
    loads: list[list[float]]
    sizes: list[list[int]]
    current: list[list[list[int]]]
    replicas: int
    speeds: dict[int, float]
    capacity: dict[int, int] | None

    def plan(self, **options: float) -> BalancePlan:
        return plan_balance(
            self.loads,
            self.sizes,
            self.nodes,
            self.current,
            replicas=self.replicas,
            speeds=self.speeds,
            capacity=self.capacity,
            **options,  # type: ignore[arg-type]
        )


LOADS = st.one_of(st.integers(0, 1000).map(float), st.sampled_from([0.0, 1.0, 1e-9, 1e12]), st.floats(0, 1e6, allow_subnormal=False))


@st.composite
def cases(draw: st.DrawFn, *, experts: int = 24, most_nodes: int = 6, layers: int = 3, capacities: bool = True) -> Case:
    nodes = draw(st.lists(st.integers(0, 1023), min_size=1, max_size=most_nodes, unique=True))
    replicas = draw(st.integers(0, 3))
    loads, sizes, current = [], [], []
    for _ in range(draw(st.integers(1, layers))):
        count = draw(st.integers(1, experts))
        loads.append(draw(st.lists(LOADS, min_size=count, max_size=count)))
        sizes.append(draw(st.lists(st.integers(1, 1 << 20), min_size=count, max_size=count)))
        own = [[draw(st.sampled_from(nodes))] for _ in range(count)]
        for _ in range(replicas):
            copy, node = draw(st.sampled_from(own)), draw(st.sampled_from(nodes))
            if node not in copy and draw(st.booleans()):
                copy.append(node)
        current.append(own)
    speeds = {node: draw(st.sampled_from([1.0, 1.0, 2.0, 7.5])) for node in nodes}
    capacity = {node: draw(st.integers(0, 1 << 22)) for node in nodes} if capacities and draw(st.booleans()) else None
    return Case(nodes, loads, sizes, current, replicas, speeds, capacity)


def largest(loads: Sequence[float], copies: Sequence[Sequence[int]], speeds: dict[int, float]) -> float:
    """The least possible largest level: some set of nodes has to do all that no other node has, and does it at best evenly."""
    groups = [set(group) for size in range(1, len(speeds) + 1) for group in itertools.combinations(speeds, size)]
    return max(
        sum(load for load, at in zip(loads, copies, strict=True) if group.issuperset(at)) / sum(speeds[node] for node in group)
        for group in groups
    )


def held(case: Case, copies: Sequence[Sequence[Sequence[int]]], node: int) -> int:
    return sum(
        size for sizes, layer in zip(case.sizes, copies, strict=True) for size, at in zip(sizes, layer, strict=True) if node in at
    )


FULL_BUT_ONE = Case(
    nodes=[0, 1, 2, 3],
    loads=[[*[0.0] * 19, 1.0, 1.0]],
    sizes=[[*[1] * 10, 18, *[1] * 10]],
    current=[[*[[0]] * 10, [3], *[[0]] * 7, [1], [0], [1]]],
    replicas=1,
    speeds={0: 2.0, 1: 1.0, 2: 1.0, 3: 2.0},
    capacity={0: 36, 1: 0, 2: 0, 3: 0},
)


@settings(deadline=None, max_examples=80)
@example(FULL_BUT_ONE)
@given(cases())
def test_plan_keeps_every_bound(case: Case) -> None:
    plan = case.plan(**FREE)
    assert [len(layer) for layer in plan.copies] == [len(layer) for layer in case.current]
    for layer in plan.copies:
        assert all(at and len(set(at)) == len(at) and set(at) <= set(case.nodes) for at in layer)
        assert sum(len(at) - 1 for at in layer) <= max(case.replicas, 0) or plan.empty
    if case.capacity is not None:
        for node, bound in case.capacity.items():
            assert held(case, plan.copies, node) <= max(bound, held(case, case.current, node))
    if len(case.nodes) == 1:
        assert plan.empty
        assert plan.reason == ONE_NODE


@settings(deadline=None, max_examples=80)
@given(cases())
def test_plan_is_never_worse_than_before(case: Case) -> None:
    plan = case.plan(**FREE)
    assert plan.after.ratio <= plan.before.ratio * (1 + 1e-4)
    for layer, loads in enumerate(case.loads):
        now, then = (largest(loads, copies[layer], case.speeds) for copies in (case.current, plan.copies))
        assert then <= now * (1 + 1e-4)
        mean = sum(loads) / sum(case.speeds.values())
        assert plan.after.layers[layer] * mean == pytest.approx(then, rel=5e-3) or not mean


@settings(deadline=None, max_examples=60)
@given(cases())
def test_steps_lead_from_what_there_is_to_what_is_planned(case: Case) -> None:
    plan = case.plan(**FREE)
    copies = [[list(at) for at in layer] for layer in case.current]
    for copy in plan.dropped:
        assert copy.node in copies[copy.layer][copy.expert][1:]
        copies[copy.layer][copy.expert].remove(copy.node)
    for move in plan.moves:
        at = copies[move.layer][move.expert]
        assert at[0] == move.source
        assert move.target not in at
        at[0] = move.target
    for copy in plan.replicas:
        assert copy.node not in copies[copy.layer][copy.expert]
        copies[copy.layer][copy.expert].append(copy.node)
    assert [[(at[0], *sorted(at[1:])) for at in layer] for layer in copies] == [list(layer) for layer in plan.copies]
    assert plan.bytes == sum(case.sizes[step.layer][step.expert] for step in (*plan.moves, *plan.replicas))


def placements(count: int, nodes: Sequence[int], extra: int) -> Iterator[list[tuple[int, ...]]]:
    """All there are, with up to so many further copies."""
    subsets = [group for size in range(1, len(nodes) + 1) for group in itertools.combinations(nodes, size)]
    if count == 0:
        yield []
        return
    for first in subsets:
        if len(first) - 1 <= extra:
            for rest in placements(count - 1, nodes, extra - len(first) + 1):
                yield [first, *rest]


@settings(deadline=None, max_examples=80)
@given(cases(experts=5, most_nodes=3, layers=1, capacities=False))
def test_small_case_is_within_two_percent_of_exhaustive_search(case: Case) -> None:
    plan = case.plan(**FREE)
    (loads,), (copies,) = case.loads, plan.copies
    extra = min(case.replicas, 2)
    best = min(largest(loads, all_copies, case.speeds) for all_copies in placements(len(loads), case.nodes, extra))
    assert largest(loads, copies, case.speeds) <= 1.02 * best


def test_four_nodes_are_within_two_percent_of_exhaustive_search() -> None:
    loads = [911.0, 640.0, 402.0, 398.0, 220.0, 87.0, 55.0, 12.0]
    speeds = dict.fromkeys(range(4), 1.0)
    best = min(largest(loads, [(node,) for node in homes], speeds) for homes in itertools.product(range(4), repeat=8))
    plan = plan_balance([loads], 1, range(4), [[[e // 2] for e in range(8)]], **FREE)  # type: ignore[arg-type]
    assert largest(loads, plan.copies[0], speeds) <= 1.02 * best
    copied = plan_balance([loads], 1, range(4), [[[e // 2] for e in range(8)]], replicas=2, **FREE)  # type: ignore[arg-type]
    assert copied.after.ratio <= 1.02
    assert len(copied.replicas) <= 2


def test_plan_that_would_not_pay_is_not_made() -> None:
    current = [[[0], [0], [1], [1]]]
    near = plan_balance([[10, 10, 10, 9]], 1, (0, 1), current)
    assert near.empty
    assert near.after == near.before
    assert "not worth it" in near.reason or "stay where they are" in near.reason
    skewed = [[30, 30, 1, 1]]
    assert plan_balance(skewed, 1 << 20, (0, 1), current).moves
    dear = plan_balance(skewed, 1 << 40, (0, 1), current)
    assert dear.empty
    assert "cost more than it saves" in dear.reason
    assert plan_balance(skewed, 1 << 40, (0, 1), current, horizon_s=1e6).moves
    nothing = plan_balance([[0, 0, 0, 0]], 1, (0, 1), current)
    assert nothing.empty
    assert "anything to do yet" in nothing.reason


def test_only_layers_that_pay_are_changed() -> None:
    current = [[[0], [0], [1], [1]]] * 2
    plan = plan_balance([[30, 30, 1, 1], [0.010, 0.010, 0.001, 0.001]], 1 << 30, (0, 1), current)
    assert {move.layer for move in plan.moves} == {0}
    assert plan.gain > 0.3


def test_hot_expert_gets_the_copy() -> None:
    plan = plan_balance([[90, 10, 10, 10]], 1 << 20, (4, 9), [[[4], [4], [9], [9]]], replicas=1)
    (replica,) = plan.replicas
    assert (replica.expert, replica.node) == (0, 9)
    assert plan.after.ratio == pytest.approx(1.0, abs=0.01)
    assert plan.reason.startswith("max/mean falls from 1.67 to 1.00 by 1 ")


def test_faster_node_gets_more() -> None:
    current = [[[0]] * 4 + [[1]] * 4]
    plan = plan_balance([[1.0] * 8], 1, (0, 1), current, speeds={0: 1.0, 1: 3.0})
    assert list(plan.copies[0]).count((0,)) == 2


def test_copies_beyond_what_is_allowed_are_dropped() -> None:
    current = [[[0, 1], [1, 0], [0], [1]]]
    plan = plan_balance([[50, 10, 10, 10]], 1, (0, 1), current, replicas=1)
    (dropped,) = plan.dropped
    assert (dropped.expert, dropped.node) == (1, 0)
    assert not plan.moves


def test_layer_that_lies_across_the_nodes_stays() -> None:
    plan = plan_balance([[100], [30, 30, 1, 1]], 1, (0, 1), [[[]], [[0], [0], [1], [1]]])
    assert plan.copies[0] == ((),)
    assert {move.layer for move in plan.moves} == {1}
    assert plan.before.layers[0] == 1.0


def test_same_question_gets_the_same_answer() -> None:
    loads = [[float(7 * expert % 31) for expert in range(16)] for _ in range(3)]
    current = [[[expert % 4] for expert in range(16)] for _ in range(3)]
    first, second = (plan_balance(loads, 100, range(4), current, replicas=2) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"nodes": [0, 0]}, "nodes"),
        ({"nodes": []}, "nodes"),
        ({"load": [[1.0]]}, "layer 0"),
        ({"load": []}, "layers"),
        ({"load": [[1.0, -1.0]]}, "negative"),
        ({"load": [[1.0, float("nan")]]}, "no number"),
        ({"current": [[[0], [5]]]}, "expert 1"),
        ({"current": [[[0], [1, 1]]]}, "two copies"),
        ({"expert_bytes": [[1]]}, "sizes"),
        ({"speeds": {0: 1.0}}, "speed"),
    ],
)
def test_misfit_is_refused_by_name(change: dict[str, object], names: str) -> None:
    arguments = {"load": [[1.0, 2.0]], "expert_bytes": 1, "nodes": [0, 1], "current": [[[0], [1]]], **change}
    with pytest.raises(ValueError, match=names):
        plan_balance(**arguments)  # type: ignore[arg-type]
