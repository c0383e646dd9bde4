"""What others say, fit to be shown: names of nodes, what they say of themselves, and why they failed. And numbers of things."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # commands that speak to nobody need not load it
    from google.protobuf.message import Message

_LONGEST_NAME = 256
_Message = TypeVar("_Message", bound="Message")


def printable(text: str, *, most: int | None = None) -> str:
    """The first characters of it, on one line, and nothing in it that a terminal obeys. What is fit already stays as it is."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:most])


def counted(count: int, noun: str) -> str:
    """'1 node', '2 nodes'; the last word of the noun takes an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def with_printable_texts(message: _Message) -> _Message:
    """The same message, each of its own strings printable, and no longer than names are."""
    for field, value in message.ListFields():
        if isinstance(value, str):
            setattr(message, field.name, printable(value, most=_LONGEST_NAME))
    return message
