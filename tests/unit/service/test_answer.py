"""An answer's text does not depend on how its tokens were bunched, and ends where a stop string begins."""

from __future__ import annotations

from hypothesis import given, strategies as st

from ops.random_model import random_tokenizer
from service.answer import Answer
from service.tokenizer import Tokenizer

TOKENIZER = Tokenizer(random_tokenizer(300).encode())


def tell(text: str, stops: list[str], *, include_stop: bool = False) -> tuple[str, str | None, int]:
    answer = Answer(TOKENIZER.continuation(), stops=stops, include_stop=include_stop)
    told = ""
    for token in TOKENIZER.encode(text):
        told += answer.feed(token)
        if answer.matched is not None:
            return told, answer.matched, answer.tokens
    return told + answer.finish(), answer.matched, answer.tokens


@given(st.text(alphabet="ab é😀", max_size=20), st.lists(st.text(alphabet="ab é😀", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    told, matched, _ = tell(text, stops)
    if matched is None:
        assert told == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(told + matched)
        assert not any(stop in told for stop in stops)


def test_a_stop_string_in_the_very_last_token_is_found() -> None:
    assert tell("hello END", ["END"]) == ("hello ", "END", 9)


def test_the_stop_string_stays_if_asked_for() -> None:
    assert tell("hello END more", ["END"], include_stop=True)[0] == "hello END"


def test_a_held_back_beginning_is_given_out_at_the_end() -> None:
    assert tell("hello EN", ["END"]) == ("hello EN", None, 8)


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    answer = Answer(TOKENIZER.continuation())
    told = "".join(answer.feed(token) for token in TOKENIZER.encode("😀")[:3])
    assert told == ""
    assert answer.finish() == "\ufffd"


def test_without_a_tokenizer_tokens_are_counted_and_the_text_is_empty() -> None:
    answer = Answer(None)
    assert [answer.feed(token) for token in (1, 2, 3)] == ["", "", ""]
    assert (answer.finish(), answer.tokens) == ("", 3)
