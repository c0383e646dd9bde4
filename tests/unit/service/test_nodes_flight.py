"""One layer's experts under way: answered once, whatever nodes do; late and foreign answers count for nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.nodes.flight import Flight, Sent
from service.nodes.lifecycle import STEADY_S, IllegalTransition, Life, State

EXPERTS = 5
ROW = st.lists(st.lists(st.integers(1, 4), unique=True, max_size=3).map(sorted).map(tuple), min_size=EXPERTS, max_size=EXPERTS)


class Flying(RuleBasedStateMachine):
    """Nodes answer, end, come late in any order. What is told of each expert is counted."""

    @initialize(row=ROW, counts=st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(1, 9), min_size=1))
    def begin(self, row: list[tuple[int, ...]], counts: dict[int, int]) -> None:
        self.row, self.now, self.came = row, 0.0, dict.fromkeys(counts, 0)
        self.lost: set[int] = set()
        self.flight = Flight(counts, lambda: self.row, itertools.count(100), lambda pairs: 2.0 + pairs, hedge=1.0)
        self.asked: list[Sent] = self.flight.start(0.0)

    @rule(index=st.integers(0, 50))
    def answer(self, index: int) -> None:
        """Of anything that was ever asked, also twice, also of a node that is gone."""
        if self.asked:
            sent = self.asked[index % len(self.asked)]
            found = self.flight.answered(sent.id)
            for expert in found[1] if found else ():
                self.came[expert] += 1
                assert expert in sent.experts

    @rule(number=st.integers(-3, 90))
    def foreign(self, number: int) -> None:
        assert self.flight.answered(number) is None

    @precondition(lambda self: self.asked)
    @rule(index=st.integers(0, 50))
    def lose(self, index: int) -> None:
        self.drop(self.asked[index % len(self.asked)].key)

    def drop(self, key: int) -> None:
        self.lost.add(key)
        self.row = [tuple(k for k in keys if k != key) for keys in self.row]
        again = self.flight.lose(key, self.now)
        assert all(sent.key not in self.lost for sent in again)
        self.asked += again

    @rule(seconds=st.floats(0.1, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        hedges = self.flight.hedges(self.now)
        self.asked += hedges
        for key in self.flight.late(self.now):
            self.drop(key)
        assert self.flight.next_time() > self.now

    @rule()
    def compute_stranded(self) -> None:
        for expert in (stranded := self.flight.stranded):
            self.came[expert] += 1
        self.flight.done(stranded)

    @invariant()
    def each_expert_comes_once(self) -> None:
        for expert, times in getattr(self, "came", {}).items():
            assert times == (expert not in self.flight.wanted)

    @invariant()
    def what_is_wanted_is_asked_of_somebody_or_stranded(self) -> None:
        if hasattr(self, "flight"):
            asked = {expert for sent in self.flight.open.values() for expert in sent.experts}
            stranded = set(self.flight.stranded)
            assert self.flight.wanted <= asked | stranded
            assert all(set(self.row[expert]) <= self.flight.gone for expert in stranded)


TestFlying = Flying.TestCase


def flight(row: list[tuple[int, ...]], *, hedge: float = 0.0) -> Flight:
    return Flight(dict.fromkeys(range(len(row)), 1), lambda: row, itertools.count(), lambda _: 2.0, hedge=hedge)


def test_a_hedged_answer_is_taken_from_whoever_is_first_and_only_what_is_missing() -> None:
    made = flight([(1, 2), (1,)], hedge=0.5)
    (first,) = [sent for sent in made.start(0.0) if sent.key == 1]
    second = [sent for sent in made.open.values() if sent.key == 2]
    assert first.experts == (1,)
    made.lose(2, 0.1)
    (again,) = [sent for sent in made.open.values() if sent.experts == (0,)]
    assert (second[0].experts, again.key) == ((0,), 1)
    assert made.hedges(0.6) == []


def test_hedges_go_to_other_holders_once() -> None:
    made = flight([(1, 2)], hedge=0.5)
    (slow,) = made.start(0.0)
    (other,) = made.hedges(0.5)
    assert {slow.key, other.key} == {1, 2}
    assert made.hedges(0.9) == []
    assert made.hedged == [slow.key]
    assert made.answered(other.id) == (other, [0])
    assert made.answered(slow.id) is None


def test_what_is_hedged_is_not_asked_a_third_time_when_one_is_lost() -> None:
    made = flight([(1, 2, 3)], hedge=0.5)
    (slow,) = made.start(0.0)
    (other,) = made.hedges(0.5)
    assert made.lose(slow.key, 0.6) == []
    assert made.open == {other.id: other}


@given(st.lists(st.sampled_from(State), max_size=20))
def test_a_life_moves_as_its_table_says(targets: list[State]) -> None:
    life = Life(0.0)
    for target in targets:
        before = life.state
        try:
            life.move(target, 1.0)
        except IllegalTransition:
            assert life.state is before
    assert life.pause() <= 1.0


def test_pauses_grow_until_it_has_served_for_a_while() -> None:
    life = Life(0.0)
    pauses = []
    for _ in range(6):
        life.move(State.LOST, 1.0, "away")
        pauses.append(life.pause())
        life.move(State.CONNECTING, 1.0)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    life.move(State.READY, 2.0)
    life.move(State.LOST, 2.0 + STEADY_S, "away")
    assert (life.pause(), life.losses) == (0.1, 1)


def test_a_reason_is_news_once() -> None:
    life = Life(0.0)
    news = []
    for reason in ("other model", "other model", "other version"):
        news.append(life.move(State.REFUSED, 1.0, reason))
        life.move(State.CONNECTING, 1.0)
    assert news == [True, False, True]
    with pytest.raises(IllegalTransition):
        life.move(State.CONNECTING, 1.0)


def test_a_node_that_stays_away_is_news_once_in_whatever_words() -> None:
    life = Life(0.0)
    news = []
    for reason in ("connection refused", "it did not answer in time"):
        news.append(life.move(State.LOST, 1.0, reason))
        life.move(State.CONNECTING, 1.0)
    life.move(State.READY, 2.0)
    assert [*news, life.move(State.LOST, 3.0, "connection refused")] == [True, False, True]
