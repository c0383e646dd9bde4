"""What no node computes, in words, and when it is said."""

from __future__ import annotations

from service.nodes.coverage import SETTLE_S, Lack, Watch
from service.nodes.holders import Holder, Table

EXPERTS_OF = (0, 4, 4)


def lack(*held: tuple[int, int], ranges: tuple[tuple[int, int], ...] = (), elsewhere: frozenset[int] = frozenset()) -> Lack:
    table = Table.of([Holder(1, "a", frozenset(held), ranges)], layers=3, experts=4)
    return Lack.of(table, EXPERTS_OF, whole=(), elsewhere=elsewhere)


def test_words_say_how_much_lacks() -> None:
    half = lack((1, 0), (1, 1), (2, 2), (2, 3))
    assert half.words(EXPERTS_OF) == "2 of 4 experts a layer are held by no node"
    assert half.first == "no node holds expert 2 of layer 1 and 3 more"
    assert lack(*((1, e) for e in range(4)), (2, 0)).words(EXPERTS_OF) == "3 of 8 experts are held by no node"
    behind = lack((1, 0), ranges=((2, 3),), elsewhere=frozenset({0, 2}))
    assert behind.words(EXPERTS_OF) == "layers 0 are run by no node and 3 of 8 experts are held by no node"
    assert behind.first == "no node runs layers 0"
    everything = lack(*((layer, e) for layer in (1, 2) for e in range(4)))
    assert (everything.words(EXPERTS_OF), everything.first, bool(everything)) == ("", "", False)


def test_it_is_said_once_when_it_has_settled() -> None:
    watch = Watch()
    assert not watch.look("", 0.0)
    assert not watch.look("half", 1.0)
    assert not watch.look("all", 1.0 + SETTLE_S)  # changes yet
    assert not watch.look("half", 2.0 + SETTLE_S)
    assert watch.look("half", 2.0 + 2 * SETTLE_S)
    assert not watch.look("half", 9.0 + 2 * SETTLE_S)
    assert not watch.look("", 20.0)
    assert watch.look("", 20.0 + SETTLE_S)
