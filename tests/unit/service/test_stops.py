"""Stop strings: the streaming matcher against a naive one that sees the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from service.stops import StopMatcher

texts = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first prefix that ends in a stop string ends the text; the longest such string is the one that matched."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(texts, stop_lists, st.lists(st.integers(0, 30), max_size=10))
def test_streaming_finds_what_the_whole_text_shows(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for piece in pieces(text, cuts):
        match = matcher.feed(piece)
        given_out += match.text
        if match.stop is not None:
            assert (given_out, match.stop) == naive(text, stops)
            return
    assert (given_out + matcher.flush(), None) == naive(text, stops)


@given(texts, stop_lists)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for char in text:
        match = matcher.feed(char)
        given_out += match.text
        if match.stop is not None:
            return
    held = text[len(given_out) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)


def test_without_stops_nothing_is_held_back() -> None:
    assert StopMatcher([]).feed("any text").text == "any text"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
