"""Who is asked for an expert, and which shares nodes are dealt."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from service.nodes.addresses import AddressError, Place, parse_places, resolve
from service.nodes.holders import NOBODY, Holders, choose, deal

NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6)


@given(NAMES, st.integers(1, 40), st.integers(1, 4))
def test_dealt_shares_cover_every_expert_as_often_as_asked(names: list[str], experts: int, replicas: int) -> None:
    shares = deal(names, experts, replicas=replicas)
    assert set(shares) == set(names)
    for expert in range(experts) if names else ():
        assert sum(expert in own for own in shares.values()) == min(replicas, len(names))
    sizes = [len(own) for own in shares.values()]
    if names:
        assert max(sizes) - min(sizes) <= replicas
    assert shares == deal(names[::-1], experts, replicas=replicas), "the order in which they were found does not matter"


@given(st.dictionaries(st.integers(0, 20), st.tuples(st.integers(1, 50), NAMES), max_size=12))
def test_each_expert_goes_to_one_of_its_holders(experts: dict[int, tuple[int, list[str]]]) -> None:
    found = choose({expert: count for expert, (count, _) in experts.items()}, lambda expert: experts[expert][1])
    assert sorted(expert for own in found.values() for expert in own) == sorted(experts)
    for name, own in found.items():
        assert own == sorted(own)
        for expert in own:
            assert (name in experts[expert][1]) if name != NOBODY else not experts[expert][1]


def test_copies_share_the_rows_evenly() -> None:
    found = choose({0: 8, 1: 5, 2: 3, 3: 1}, lambda expert: ["a"] if expert == 3 else ["a", "b"])
    assert found == {"a": [1, 2, 3], "b": [0]}


def test_holders_by_layer_and_expert() -> None:
    holders = Holders({"b": [(0, [1, 2])], "a": [(0, [2]), (3, [2])]})
    assert holders.of(0, 2) == ("a", "b")
    assert holders.of(3, 2) == ("a",)
    assert holders.of(3, 1) == ()


def test_places_are_read() -> None:
    assert parse_places("dns:///nodes:50061") == ((Place("nodes", 50061),), True)
    assert parse_places("a:1, [::1]:2") == ((Place("a", 1), Place("::1", 2)), False)
    assert str(Place("::1", 2)) == "[::1]:2"
    assert Place("127.0.0.1", 7) in resolve((Place("127.0.0.1", 7),), by_name=True)
    assert resolve((Place("no-such-host.invalid", 7),), by_name=True) == ()


@pytest.mark.parametrize("text", ["", "a", "a:", ":5", "a:0", "a:99999", "http://a:5", "a:1,,b:2", "dns:///a"])
def test_wrong_places_are_refused_by_name(text: str) -> None:
    with pytest.raises(AddressError, match="give dns:///NAME:PORT"):
        parse_places(text)
