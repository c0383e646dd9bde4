"""A step's rows in parts that follow one another over nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine_c import SeqWork

LEAST_ROWS = 64
"""Of a part. Each part reads the weights of its experts anew, and with fewer rows that takes longer than working side by side saves."""
_PER_NODE = 2
"""Parts for each node: the first node idles for the last of them and the last for the first, so more parts leave less idle."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one sequence. start: position of the first."""

    start: int
    rows: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows first <= row < end of a step."""

    first: int
    end: int
    spans: tuple[Span, ...]


def cut(work: Sequence[SeqWork], nodes: int) -> tuple[Piece, ...]:
    """Parts of about the same size, ascending, for so many nodes in a row; a single one for a single node, or for few rows. A sequence's
    rows stay in order, though they may be in several parts."""
    total = sum(len(w.tokens) for w in work)
    count = max(1, min(_PER_NODE * nodes, total // LEAST_ROWS)) if nodes > 1 else 1
    ends = [total * (number + 1) // count for number in range(count)]
    return tuple(Piece(first, end, tuple(_spans(work, first, end))) for first, end in zip([0, *ends], ends, strict=False))


def _spans(work: Sequence[SeqWork], first: int, end: int) -> Iterator[Span]:
    at = 0
    for w in work:
        low, high = max(first, at), min(end, at + len(w.tokens))
        if low < high:
            yield Span(w.start + low - at, high - low, w.blocks)
        at += len(w.tokens)
