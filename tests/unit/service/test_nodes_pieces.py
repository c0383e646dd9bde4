"""Steps in parts that follow one another over nodes."""

from __future__ import annotations

from hypothesis import given, strategies as st

from engine_c import SeqWork
from service.nodes.pieces import LEAST_ROWS, cut

WORK = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 700)), min_size=1, max_size=8).map(
    lambda sizes: [SeqWork(range(rows), start, [number]) for number, (start, rows) in enumerate(sizes)]
)


@given(WORK, st.integers(1, 5))
def test_pieces_have_every_row_once_in_order(work: list[SeqWork], nodes: int) -> None:
    pieces = cut(work, nodes)
    rows = [(span.start + n, span.blocks) for piece in pieces for span in piece.spans for n in range(span.rows)]
    assert rows == [(w.start + n, w.blocks) for w in work for n in range(len(w.tokens))]
    assert [piece.end for piece in pieces[:-1]] == [piece.first for piece in pieces[1:]]
    assert (pieces[0].first, pieces[-1].end) == (0, len(rows))
    for piece in pieces:
        assert sum(span.rows for span in piece.spans) == piece.end - piece.first > 0


@given(WORK, st.integers(1, 5))
def test_pieces_are_large_even_and_no_more_than_the_nodes_need(work: list[SeqWork], nodes: int) -> None:
    sizes = [piece.end - piece.first for piece in cut(work, nodes)]
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == 1 or (min(sizes) >= LEAST_ROWS and nodes > 1 and len(sizes) <= 2 * nodes)


def test_a_decode_step_is_one_piece_and_a_prompt_several() -> None:
    decode = [SeqWork([1], 50, [0]) for _ in range(32)]
    assert len(cut(decode, 2)) == 1
    assert [piece.spans[0].start for piece in cut([SeqWork(range(4 * LEAST_ROWS), 10, [0, 1])], 2)] == [10, 74, 138, 202]
    assert len(cut([SeqWork(range(4 * LEAST_ROWS), 0, [0, 1])], 1)) == 1
