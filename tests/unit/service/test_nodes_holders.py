"""Who computes which experts, and how shares are dealt."""

from __future__ import annotations

from hypothesis import given, strategies as st

from service.nodes.holders import Holder, Table, choose
from service.nodes.shares import Dealer, deal

LAYERS, EXPERTS = 3, 6
PAIRS = st.frozensets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)))
HOLDERS = st.lists(PAIRS, max_size=5)
COUNTS = st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(1, 99)).map(lambda counts: dict(sorted(counts.items())))


def table(held: list[frozenset[tuple[int, int]]]) -> Table:
    return Table.of([Holder(10 + i, f"n{i}", pairs) for i, pairs in enumerate(held)], layers=LAYERS, experts=EXPERTS)


@given(HOLDERS, COUNTS, st.frozensets(st.integers(10, 14)))
def test_each_expert_goes_to_one_holder_that_may_be_asked(
    held: list[frozenset[tuple[int, int]]], counts: dict[int, int], without: frozenset[int]
) -> None:
    choice = choose(table(held).rows[1], counts, without=without)
    given_out = [expert for experts in choice.experts.values() for expert in experts]
    assert sorted([*given_out, *choice.left]) == sorted(counts)
    for key, experts in choice.experts.items():
        assert key not in without
        assert all((1, expert) in held[key - 10] for expert in experts)
        assert experts == sorted(experts)
    assert all((1, expert) not in held[i] for expert in choice.left for i in range(len(held)) if 10 + i not in without)


@given(COUNTS, st.integers(2, 5))
def test_with_a_choice_no_holder_has_more_than_the_heaviest_expert_beyond_another(counts: dict[int, int], nodes: int) -> None:
    everything = frozenset((1, expert) for expert in range(EXPERTS))
    choice = choose(table([everything] * nodes).rows[1], counts)
    loads = [sum(counts[expert] for expert in choice.experts.get(10 + i, [])) for i in range(nodes)]
    assert max(loads) - min(loads) <= max(counts.values(), default=0)


def test_ties_go_to_another_from_expert_to_expert_and_layer_to_layer() -> None:
    both = frozenset({(0, 0), (0, 1), (1, 0)})
    rows = Table.of([Holder(1, "b", both), Holder(2, "a", both)], layers=LAYERS, experts=EXPERTS).rows
    assert choose(rows[0], {0: 5}).experts == {2: [0]}
    assert choose(rows[0], {1: 5}).experts == {1: [1]}
    assert choose(rows[1], {0: 5}).experts == {1: [0]}


def test_one_that_leaves_is_asked_only_for_what_it_alone_holds() -> None:
    leaving = Holder(1, "a", frozenset({(0, 0), (0, 1)}), leaving=True)
    rows = Table.of([leaving, Holder(2, "b", frozenset({(0, 1)}))], layers=LAYERS, experts=EXPERTS).rows
    assert (rows[0][0], rows[0][1]) == ((1,), (2,))


def test_what_the_model_does_not_have_counts_for_nothing() -> None:
    made = table([frozenset({(0, 0), (99, 0), (0, 99), (-1, 2)})])
    assert made.uncovered([2, 0, 1]) == [(0, 1), (2, 0)]


@given(st.sets(st.text(min_size=1), min_size=1, max_size=7), st.integers(1, 40), st.integers(1, 3))
def test_shares_cover_everything_evenly_by_names_alone(names: set[str], experts: int, replicas: int) -> None:
    shares = deal(sorted(names, reverse=True), [experts, 0], replicas=replicas)
    assert shares == deal(names, [experts, 0], replicas=replicas)
    copies = min(replicas, len(names))
    held = [pair for pairs in shares.values() for pair in pairs]
    assert sorted(held) == sorted((0, expert) for expert in range(experts) for _ in range(copies))
    sizes = [len(pairs) for pairs in shares.values()]
    assert max(sizes) - min(sizes) <= copies


def test_nodes_that_join_together_are_dealt_together() -> None:
    dealer = Dealer(join_s=1, leave_s=10)
    assert dealer.look({"a"}, set(), 0.0) is None
    assert dealer.look({"a", "b"}, set(), 0.9) is None
    assert dealer.look({"a", "b"}, set(), 1.8) is None
    assert dealer.look({"a", "b"}, set(), 2.0) == {"a", "b"}
    assert dealer.look({"a", "b"}, set(), 9.0) is None


def test_a_node_that_vanished_has_time_to_come_back() -> None:
    dealer = Dealer(join_s=0, leave_s=10)
    dealer.look({"a", "b"}, set(), 0.0)
    assert dealer.look({"a"}, set(), 9.0) is None
    assert dealer.look({"a", "b"}, set(), 9.5) is None
    assert dealer.look({"a"}, set(), 19.4) is None
    assert dealer.look({"a"}, set(), 19.6) == {"a"}


def test_a_node_that_says_it_leaves_is_left_out_at_once() -> None:
    dealer = Dealer(join_s=0, leave_s=10)
    dealer.look({"a", "b"}, set(), 0.0)
    assert dealer.look({"a", "b"}, {"b"}, 0.1) == {"a"}


def test_nothing_is_dealt_to_nobody() -> None:
    dealer = Dealer(join_s=0, leave_s=1)
    dealer.look({"a"}, set(), 0.0)
    assert dealer.look(set(), set(), 5.0) is None
