"""Shares given to nodes that take any: what stays as it is, what is given again, and front ends that see different nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st

from colibri.v1 import node_pb2
from service.nodes.addresses import Place
from service.nodes.dealing import Dealing
from service.nodes.lifecycle import State
from service.nodes.link import Identity, Unreachable
from service.nodes.member import Member
from service.nodes.shares import Pairs, deal, lacking, most_held, suits

EXPERTS_OF = (6, 0, 6)
ALL = frozenset((layer, expert) for layer, count in enumerate(EXPERTS_OF) for expert in range(count))
NAMES = st.sets(st.text("abcdefg", min_size=1, max_size=3), min_size=1, max_size=6)


@given(NAMES, st.lists(st.sampled_from([0, 6, 7, 16]), max_size=4).map(lambda some: [*some, 9]), st.integers(1, 3), st.floats(0, 1))
def test_what_was_dealt_suits_and_with_one_more_or_less_it_does_not(
    names: set[str], experts_of: list[int], replicas: int, slack: float
) -> None:
    dealt = deal(names, experts_of, replicas=replicas)
    assert suits(dealt, experts_of, replicas=replicas, slack=slack)
    assert max(map(len, dealt.values())) <= most_held(len(names), experts_of, replicas=replicas, slack=slack)
    assert not lacking(dealt, experts_of)
    assert not suits({**dealt, "new": frozenset()}, experts_of, replicas=replicas, slack=slack)
    first = min(names)
    less = {**dealt, first: frozenset(sorted(dealt[first])[1:])}
    assert not suits(less, experts_of, replicas=replicas, slack=slack)


def test_too_much_on_one_node_does_not_suit() -> None:
    dealt = deal("abc", EXPERTS_OF)
    assert suits(dealt, EXPERTS_OF, replicas=1, slack=0.25)
    assert suits({**dealt, "a": dealt["a"] | {(0, 5)}}, EXPERTS_OF, replicas=1, slack=0.25)
    assert not suits({**dealt, "a": ALL}, EXPERTS_OF, replicas=1, slack=0.25)


@dataclass
class Node:
    """What a node keeps: the last assignment it took. Each is looked at for what all nodes hold then."""

    name: str
    held: Pairs = frozenset()
    instance: str = "1"
    draining: bool = False
    refuses: bool = False
    assigned: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def describe(self) -> node_pb2.NodeDescription:
        state = node_pb2.NODE_STATE_DRAINING if self.draining else node_pb2.NODE_STATE_READY
        said = node_pb2.NodeDescription(name=self.name, instance=self.instance, assignable=True, state=state)
        for layer in sorted({layer for layer, _ in self.held}):
            said.shares.add(layer=layer, experts=sorted(expert for at, expert in self.held if at == layer))
        return said

    def assign(self, shares: Mapping[int, Sequence[int]]) -> node_pb2.NodeDescription:
        if self.refuses:
            raise Unreachable("it does not want to")
        with self.lock:
            self.held = frozenset((layer, expert) for layer, experts in shares.items() for expert in experts)
            self.assigned += 1
            return self.describe()


class Quiet:
    """Whom members tell what nobody here wants to know."""

    def admit(self, member: Member, link: object) -> None: ...
    def changed(self) -> None: ...
    def told(self, link: object, response: object) -> None: ...
    def lost(self, link: object) -> None: ...


class FrontEnd:
    """One that sees some nodes. `look` tells it what they are, deals, and returns when what came of it is done."""

    def __init__(self, nodes: Sequence[Node], *, replicas: int = 1) -> None:
        self.dealing = Dealing(EXPERTS_OF, replicas=replicas, redeal_s=10.0, slack=0.25)
        self.nodes = list(nodes)
        self.members: dict[str, Member] = {}

    def look(self, now: float) -> None:
        present = []
        for node in self.nodes:
            member = self.members.setdefault(node.name, _member(node))
            member.describe(node.describe())
            present.append(member)
        self.dealing.look(present, now)
        with self.dealing._turn:
            pass


def _member(node: Node) -> Member:
    member = Member(Place(node.name, 1), Quiet(), lambda _: None, Identity("", "", "", "", ""), lambda _: "")  # type: ignore[arg-type, return-value]
    member.link = node  # type: ignore[assignment]
    member.life.move(State.READY, 0.0)
    return member


def run(fronts: Sequence[FrontEnd], seconds: int, start: float) -> float:
    """Looks of all front ends, about once a second each. Returns the time then."""
    for step in range(seconds):
        for front in fronts:
            front.look(start + step * 1.1)
    return start + seconds * 1.1


def held(nodes: Sequence[Node]) -> dict[str, Pairs]:
    return {node.name: node.held for node in nodes}


def test_nodes_get_their_shares_and_a_second_front_end_changes_nothing() -> None:
    nodes = [Node(name) for name in "abc"]
    first = FrontEnd(nodes)
    now = run([first], 6, time.monotonic())
    assert held(nodes) == deal("abc", EXPERTS_OF)
    moved = {"a": nodes[0].held | {(0, 5)}, "c": nodes[2].held - {(0, 5)}}
    assert first.dealing.shift(first.members, moved, first.dealing.deals)
    assert held(nodes) == {**deal("abc", EXPERTS_OF), **moved}
    counts = [node.assigned for node in nodes]
    second = FrontEnd(nodes)
    run([first, second], 20, now)
    assert [node.assigned for node in nodes] == counts
    assert second.dealing.target == first.dealing.target == held(nodes)
    assert first.dealing.foreign == second.dealing.foreign == 0


def test_what_one_front_end_moves_the_other_takes_over() -> None:
    nodes = [Node(name) for name in "abc"]
    first, second = FrontEnd(nodes), FrontEnd(nodes)
    now = run([first, second], 8, time.monotonic())
    moved = {"a": nodes[0].held | {(0, 5)}, "c": nodes[2].held - {(0, 5)}}
    assert first.dealing.shift(first.members, moved, first.dealing.deals)
    counts = [node.assigned for node in nodes]
    now = run([first, second], 8, now)
    assert [node.assigned for node in nodes] == counts
    assert second.dealing.target == held(nodes)
    assert second.dealing.foreign == 2
    nodes[0].held, nodes[0].instance = frozenset(), "2"
    run([second, first], 3, now)
    assert nodes[0].held == moved["a"]


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=2, max_size=3), st.integers(1, 2))
def test_front_ends_that_see_different_nodes_come_to_rest(views: list[set[int]], replicas: int) -> None:
    nodes = [Node(name) for name in "abcd"]
    fronts = [FrontEnd([nodes[i] for i in sorted(view)], replicas=replicas) for view in views]
    now = run(fronts, 40, time.monotonic())
    counts = [node.assigned for node in nodes]
    now = run(fronts, 10, now)
    assert [node.assigned for node in nodes] == counts
    for front in fronts:
        assert not lacking(held(front.nodes), EXPERTS_OF)


def test_a_node_that_joins_or_leaves_is_dealt_for() -> None:
    nodes = [Node(name) for name in "abcd"]
    front = FrontEnd(nodes[:3])
    now = run([front], 6, time.monotonic())
    front.nodes = nodes
    now = run([front], 6, now)
    assert held(nodes) == deal("abcd", EXPERTS_OF)
    nodes[1].draining = True
    now = run([front], 2, now)
    assert {name: pairs for name, pairs in held(nodes).items() if name != "b"} == deal("acd", EXPERTS_OF)
    front.nodes = [nodes[0], nodes[2]]
    run([front], 12, now)
    assert held(front.nodes) == deal("ac", EXPERTS_OF)


def test_a_step_that_a_node_does_not_take_is_undone() -> None:
    nodes = [Node(name) for name in "abc"]
    front = FrontEnd(nodes)
    now = run([front], 6, time.monotonic())
    before = held(nodes)
    nodes[2].refuses = True
    assert not front.dealing.shift(front.members, {"a": before["a"] | {(0, 3)}, "c": before["c"] | {(0, 0)}}, front.dealing.deals)
    assert front.dealing.target == before
    nodes[2].refuses = False
    run([front], 3, now)
    assert held(nodes) == before


def test_a_step_planned_before_a_deal_is_not_made() -> None:
    nodes = [Node(name) for name in "abc"]
    front = FrontEnd(nodes)
    now = run([front], 6, time.monotonic())
    deals = front.dealing.deals
    nodes[0].draining = True
    run([front], 2, now)
    assert not front.dealing.shift(front.members, {"b": ALL}, deals)
    assert held(nodes[1:]) == deal("bc", EXPERTS_OF)
