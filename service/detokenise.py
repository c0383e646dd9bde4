"""Token ids to text, all at once or as they come. Pure.

Every token stands for some bytes, so a text is the bytes of its tokens read as UTF-8. A character whose bytes are spread over tokens is
held back until it is whole; bytes that are no UTF-8 become U+FFFD, one for each maximal bad sequence. Deltas therefore add up to the whole
decode exactly, by construction: both go through the same incremental decoder.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Json = Mapping[str, object]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoder(ValueError):
    """The tokenizer file asks for a decoder this module does not know."""


@dataclass(slots=True)
class Rules:
    """How a tokenizer's pieces become bytes, read from the `decoder` of its tokenizer.json."""

    byte_level: bool = False  # pieces are written in GPT-2's printable stand-ins for bytes
    byte_fallback: bool = False  # pieces <0xNN> are single bytes
    replacements: list[tuple[str, str]] = field(default_factory=list)
    strip_start: str = ""  # taken off the beginning of a text, once a character
    joiner: str = ""  # between pieces, if there is no decoder at all


def read_rules(decoder: object) -> Rules:
    """The rules of a `decoder` entry of tokenizer.json (a dict or None). Raises UnsupportedDecoder."""
    rules = Rules()
    if decoder is None:
        rules.joiner = " "
        return rules
    for step in _steps(decoder):
        _read_step(step, rules)
    return rules


def _steps(decoder: object) -> list[Json]:
    if not isinstance(decoder, Mapping):
        raise UnsupportedDecoder(f"the tokenizer's decoder is not an object but {type(decoder).__name__}")
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders") or () for step in _steps(inner)]


def _read_step(step: Json, rules: Rules) -> None:
    kind = step.get("type")
    if kind == "ByteLevel":
        rules.byte_level = True
    elif kind == "ByteFallback":
        rules.byte_fallback = True
    elif kind == "Replace":
        pattern = step.get("pattern")
        if not isinstance(pattern, Mapping) or "String" not in pattern:
            raise UnsupportedDecoder(f"the tokenizer's decoder replaces {pattern!r}; only plain strings are supported")
        rules.replacements.append((str(pattern["String"]), str(step.get("content", ""))))
    elif kind == "Strip":
        if step.get("stop"):
            raise UnsupportedDecoder("the tokenizer's decoder strips the end of the text, which no stream can know")
        rules.strip_start = str(step.get("content", " ")) * int(str(step.get("start", 0)))
    elif kind == "Metaspace":
        rules.replacements.append((str(step.get("replacement", "▁")), " "))
        rules.strip_start = "" if step.get("prepend_scheme", "always") == "never" else " "
    elif kind != "Fuse":
        known = "ByteLevel, ByteFallback, Replace, Strip, Metaspace and Fuse are"
        raise UnsupportedDecoder(f"the tokenizer's decoder {kind!r} is not supported ({known})")


def byte_level_table() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 characters are themselves, every other byte is the next character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = byte_level_table()


def piece_bytes(piece: str, rules: Rules) -> bytes:
    """The bytes one piece stands for."""
    if rules.byte_level:
        try:
            return bytes([_BYTE_LEVEL[char] for char in piece])
        except KeyError:  # an added token, written as itself
            return piece.encode()
    if rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    for old, new in rules.replacements:
        piece = piece.replace(old, new)
    return piece.encode()


class TokenBytes:
    """The bytes of every token, worked out when first asked for."""

    def __init__(self, piece_of: Callable[[int], str | None], rules: Rules, *, special: frozenset[int]) -> None:
        self.rules = rules
        self.special = special
        self._piece_of = piece_of
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def text(self, token: int) -> str | None:
        """A token's text if it is whole characters, else None."""
        try:
            return self._texts[token]
        except KeyError:
            pass
        try:
            found: str | None = self(token).decode()
        except UnicodeDecodeError:
            found = None
        self._texts[token] = found
        return found

    def __call__(self, token: int) -> bytes:
        """A token's bytes; none for an id the tokenizer does not have (models pad their vocabulary)."""
        found = self._known.get(token)
        if found is None:
            piece = self._piece_of(token)
            found = self._known[token] = b"" if piece is None else piece_bytes(piece, self.rules)
        return found


class Detokeniser:
    """One text as it grows. `continues`: it follows another text, so nothing is stripped off its beginning."""

    def __init__(self, table: TokenBytes, *, skip_special: bool = True, continues: bool = False) -> None:
        self._table = table
        self._skip_special = skip_special
        self._strip = "" if continues else table.rules.strip_start
        self._joiner = table.rules.joiner.encode()
        self._first = not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._simple = continues and self._is_simple()

    def _is_simple(self) -> bool:
        """Whether a token of whole characters just stands for them: none is half there, nothing is stripped or put between."""
        return not self._joiner and not self._strip and not self._utf8.getstate()[0]

    def feed(self, token: int) -> str:
        """The text that has become certain with this token."""
        if self._skip_special and token in self._table.special:
            return ""
        if self._simple and (text := self._table.text(token)) is not None:
            return text
        raw = self._table(token)
        if not self._first:
            raw = self._joiner + raw
        self._first = False
        text = self._trim(self._utf8.decode(raw))
        self._simple = self._is_simple()
        return text

    def flush(self) -> str:
        """What an unfinished character at the end comes to."""
        return self._trim(self._utf8.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        """Takes the strip characters off the beginning of the whole text."""
        while self._strip and text:
            if text[0] != self._strip[0]:
                self._strip = ""
                break
            text, self._strip = text[1:], self._strip[1:]
        return text


def decode(table: TokenBytes, tokens: Iterable[int] | Sequence[int], *, skip_special: bool = True) -> str:
    """A whole text."""
    detokeniser = Detokeniser(table, skip_special=skip_special)
    return "".join([detokeniser.feed(token) for token in tokens]) + detokeniser.flush()
