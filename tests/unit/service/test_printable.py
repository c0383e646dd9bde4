"""What others say, made fit to be shown."""

from __future__ import annotations

import pytest

from colibri.v1 import node_pb2
from service.printable import counted, printable, with_printable_texts


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("host-1.example", "host-1.example"),
        ("Zwölf kolibrí 蜂鳥", "Zwölf kolibrí 蜂鳥"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b[2J\x9b\x07\x00\x7f", r"\x1b[2J\x9b\x07\x00\x7f"),
        ("\u202eevil\u2028\ufeff", r"\u202eevil\u2028\ufeff"),
    ],
)
def test_all_that_a_terminal_obeys_is_escaped_once(said: str, shown: str) -> None:
    assert printable(said) == shown
    assert printable(shown) == shown
    assert printable(shown).isprintable()


@pytest.mark.parametrize(("count", "text"), [(0, "0 embedded files"), (1, "1 embedded file"), (2, "2 embedded files")])
def test_one_thing_is_counted_without_an_s(count: int, text: str) -> None:
    assert counted(count, "embedded file") == text


def test_only_so_many_characters_are_shown() -> None:
    assert printable("ab\nc", most=3) == r"ab\n"


def test_a_message_keeps_all_but_its_texts() -> None:
    said = node_pb2.NodeDescription(name="n\n" * 200, version="\x1b", layers=3, model_digest="ab")
    said.shares.add(layer=1, experts=[2])
    shown = with_printable_texts(node_pb2.NodeDescription.FromString(said.SerializeToString()))
    assert (shown.name, shown.version) == (r"n\n" * 128, r"\x1b")
    shown.name, shown.version = said.name, said.version
    assert shown == said
