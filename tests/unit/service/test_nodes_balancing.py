"""Plans over nodes that compute for a front end: within room, every expert with its copies, evener than before."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings, strategies as st

from service.nodes.balancing import NodesPlan, Standing, plan_nodes
from service.nodes.shares import deal, most_held

SIZE = 1 << 20


@dataclass(frozen=True)
class Case:
    names: list[str]
    experts_of: list[int]
    load: list[list[float]]
    copies: int
    slack: float
    lanes: list[int]

    def plan(self, **options: object) -> NodesPlan:
        held = deal(self.names, self.experts_of, replicas=self.copies)
        nodes = [Standing(name, held[name], lanes) for name, lanes in zip(self.names, self.lanes, strict=True)]
        usual = {"expert_bytes": SIZE, "least": self.copies, "slack": self.slack, "min_gain": 0.0}
        return plan_nodes(self.load, nodes, self.experts_of, **(usual | options))  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = draw(st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=5, unique=True))
    experts_of = draw(st.lists(st.sampled_from([0, 4, 8, 9]), min_size=1, max_size=3))
    load = [draw(st.lists(st.integers(0, 5000).map(float), min_size=9, max_size=9)) for _ in experts_of]
    lanes = draw(st.lists(st.integers(1, 4), min_size=len(names), max_size=len(names)))
    return Case(names, experts_of, load, draw(st.integers(1, 3)), draw(st.sampled_from([0.0, 0.1, 0.25, 1.0])), lanes)


@settings(max_examples=80)
@given(cases())
def test_every_expert_keeps_its_copies_and_no_node_takes_more_than_it_has_room_for(case: Case) -> None:
    found = case.plan()
    copies = min(case.copies, len(case.names))
    assert found.names == tuple(sorted(case.names))
    assert [len(row) for row in found.plan.copies] == case.experts_of
    assert all(len(at) >= copies for row in found.plan.copies for at in row)
    most = most_held(len(case.names), case.experts_of, replicas=copies, slack=case.slack)
    layers = range(len(case.experts_of))
    for name in case.names:
        assert sum(len(found.share(name, layer)) for layer in layers) <= most
    assert found.plan.after.ratio <= found.plan.before.ratio * (1 + 5e-3)


HOT = Case(["a", "b", "c", "d"], [8], [[900.0, 20, 20, 20, 20, 20, 20, 20]], 1, 0.5, [1] * 4)


def test_a_hot_expert_is_copied_where_there_is_room() -> None:
    found = HOT.plan()
    assert len(found.plan.copies[0][0]) == 4
    assert found.plan.after.ratio < 1.05 < 3 < found.plan.before.ratio


def test_copies_can_be_forbidden() -> None:
    found = HOT.plan(replicas=0)
    assert all(len(at) == 1 for at in found.plan.copies[0])


def test_without_slack_there_is_no_room_for_copies() -> None:
    held = deal(HOT.names, [8])
    nodes = [Standing(name, held[name]) for name in HOT.names]
    assert not plan_nodes(HOT.load, nodes, [8], expert_bytes=SIZE, min_gain=0.0).plan.replicas


def test_memory_bounds_what_a_node_takes() -> None:
    held = deal(HOT.names, [8])
    nodes = [Standing(name, held[name], memory_bytes=SIZE * 9 // 4 if name != "a" else 0) for name in HOT.names]
    plan = plan_nodes(HOT.load, nodes, [8], expert_bytes=SIZE, slack=2.0, min_gain=0.0).plan
    assert all(sum(number in at for at in plan.copies[0]) <= 2 for number in (1, 2, 3))


def test_what_others_compute_as_well_weighs_less() -> None:
    even = HOT.plan(fixed=lambda layer, expert: 44 if expert == 0 else 0)
    assert even.plan.empty, even.plan.reason


def test_a_node_with_more_lanes_gets_more() -> None:
    case = Case(["a", "b"], [8], [[10.0] * 8], 1, 1.0, [1, 3])
    assert len(case.plan(replicas=0).share("b", 0)) == 6


def test_one_node_has_nothing_to_even_out() -> None:
    assert Case(["a"], [4], [[9.0, 1, 1, 1]], 2, 1.0, [1]).plan().plan.empty
