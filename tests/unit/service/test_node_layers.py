"""Whose KV blocks are whose on a node, and what it makes of rows for its layers before anything is computed."""

from __future__ import annotations

import tracemalloc
from array import array

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibri.v1 import experts_pb2 as pb
from engine_c import KV_BLOCK
from service.node.batches import BatchError
from service.node.layers import LayerWork, NoRoom, Room, Rooms, check_layers

HIDDEN, CONTEXT, HELD = 8, 64, ((2, 6), (8, 9))


def part(start: int, rows: int, *blocks: int) -> pb.LayerSequence:
    return pb.LayerSequence(start=start, rows=rows, blocks=array("i", blocks).tobytes())


def message(*parts: pb.LayerSequence, first: int = 2, end: int = 6, x: bytes | None = None) -> pb.LayerBatch:
    rows = sum(p.rows for p in parts)
    return pb.LayerBatch(first=first, end=end, sequences=parts, x=bytes(4 * HIDDEN * rows) if x is None else x)


def take(asked: pb.LayerBatch, room: Room | None) -> LayerWork:
    return check_layers(asked, hidden=HIDDEN, ranges=HELD, context=CONTEXT, room=room)


def room(**changes: object) -> Room:
    return Room(**({"owner": "a", "instance": "", "base": 100, "blocks": 10} | changes))  # type: ignore[arg-type]


def test_blocks_are_the_streams_own() -> None:
    work = take(message(part(0, 20, 3, 0), part(33, 1, 9, 1, 2)), room())
    assert [list(s.blocks) for s in work.sequences] == [[103, 100], [109, 101, 102]]
    assert [(s.start, len(s.tokens)) for s in work.sequences] == [(0, 20), (33, 1)]
    assert work.x.shape == (21, HIDDEN)


def test_a_sequence_that_goes_on_keeps_its_list_and_another_in_its_place_does_not() -> None:
    own = room()
    first = take(message(part(0, 16, 1), part(0, 16, 2)), own).sequences
    second = take(message(part(16, 1, 1, 3), part(0, 1, 4)), own).sequences
    assert second[0].blocks is first[0].blocks
    assert list(second[0].blocks) == [101, 103]
    assert list(second[1].blocks) == [104]
    assert list(first[1].blocks) == [102]
    third = take(message(part(0, 1, 4)), own).sequences
    assert list(third[0].blocks) == [104]
    assert len(own.tables) == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (message(part(0, 1, 0), first=1), "layers 1 to 6 are not"),
        (message(part(0, 1, 0), end=7), "layers 2 to 7 are not"),
        (message(part(0, 1, 0), first=4, end=4), "layers 4 to 4 are not"),
        (message(part(0, 1, 0), first=5, end=9), "layers 5 to 9 are not"),
        (message(), "sequences: at least one"),
        (message(part(0, 0, 0)), "positions 0 to 0"),
        (message(part(60, 5, 0, 1, 2, 3, 4)), "positions 60 to 65"),
        (message(part(16, 1, 0)), "1 KV blocks do not hold 17"),
        (message(part(0, 1, 10)), "no KV blocks 10 to 10, the stream has 10"),
        (message(part(0, 1, -1)), "no KV blocks -1 to -1"),
        (message(pb.LayerSequence(rows=1, blocks=b"abc")), "3 bytes"),
        (message(part(0, 2, 0), x=bytes(60)), "x: its length is 60 bytes, 2 rows of 8 elements take 64"),
        (message(part(0, 1, *range(5))), "5 KV blocks are more than the context of 64"),
        (message(*[part(0, 1, 0)] * 4097), "sequences: there are 4097, at most 4096"),
        (message(part(0, 1, 0), part(0, 1, 0)), "two write to the same"),
        (message(part(0, 17, 0, 0)), "two write to the same"),
    ],
)
def test_malformed_requests_are_refused(asked: pb.LayerBatch, says: str) -> None:
    own = room()
    with pytest.raises(BatchError, match=says):
        take(asked, own)
    assert [list(s.blocks) for s in take(message(part(0, 1, 0)), own).sequences] == [[100]]  # the stream goes on


def test_rows_that_are_not_there_are_refused_before_anything_is_as_large() -> None:
    parts = [pb.LayerSequence(start=0, rows=(1 << 31) - 1)] * 100
    asked = pb.LayerBatch(first=2, end=6, sequences=parts, x=bytes(4 * HIDDEN))
    tracemalloc.start()
    try:
        with pytest.raises(BatchError, match="x: its length is 32 bytes"):
            check_layers(asked, hidden=HIDDEN, ranges=HELD, context=1 << 32, room=room())
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_who_has_no_blocks_or_lost_them_is_refused() -> None:
    with pytest.raises(BatchError, match="without kv_blocks"):
        take(message(part(0, 1, 0)), None)
    with pytest.raises(BatchError, match="taken over"):
        take(message(part(0, 1, 0)), room(lost=True))


def test_two_that_read_the_same_blocks_are_taken() -> None:
    assert len(take(message(part(16, 1, 0, 1), part(16, 1, 0, 2)), room()).sequences) == 2


@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 4))
def test_pieces_are_the_rows_in_order_within_what_a_session_takes(lengths: list[int], max_rows: int, max_seqs: int) -> None:
    per = -(-CONTEXT // KV_BLOCK)
    parts = [part(0, length, *range(i * per, i * per + per)) for i, length in enumerate(lengths)]
    x = np.arange(sum(lengths) * HIDDEN, dtype=np.float32)
    work = take(message(*parts, x=x.tobytes()), room(base=0, blocks=100))
    seen: list[tuple[int, int]] = []
    rows = []
    for sequences, data in work.pieces(max_rows, max_seqs):
        assert 0 < len(sequences) <= max_seqs
        assert len(data) == sum(len(s.tokens) for s in sequences) <= max_rows
        seen += [(s.blocks[0] // per, s.start + k) for s in sequences for k in range(len(s.tokens))]
        rows.append(data)
    assert seen == [(i, k) for i, length in enumerate(lengths) for k in range(length)]
    assert np.array_equal(np.concatenate(rows).ravel(), x)


def test_who_is_refused_hears_who_has_what() -> None:
    rooms = Rooms(50)
    rooms.take(30, owner="f1 at 10.0.0.1")
    with pytest.raises(NoRoom, match=r"40 KV blocks are wanted, of this node's 50 at most 20 .*f1 at 10.0.0.1 has 30.*kv_memory"):
        rooms.take(40, owner="f2")
    with pytest.raises(NoRoom, match="60 KV blocks are wanted, this node has 50: give the node more"):
        Rooms(50).take(60, owner="f2")


class Life(RuleBasedStateMachine):
    """Streams come and go in any order: no block is two streams', and none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = Rooms(50)
        self.open: list[Room] = []

    @rule(blocks=st.integers(1, 40), process=st.integers(0, 3))
    def take(self, blocks: int, process: int) -> None:
        instance = str(process) if process else ""
        try:
            taken = self.rooms.take(blocks, owner=f"p{process}", instance=instance)
        except NoRoom:
            assert blocks > self.rooms.free or len(self.rooms.taken) > 0  # else there would be one piece
        else:
            assert taken.blocks == blocks
            self.open.append(taken)
        assert sum(1 for other in self.open if process and other.instance == instance and not other.lost) <= 1

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 50))
    def give(self, which: int) -> None:
        self.rooms.give(self.open.pop(which % len(self.open)))

    @invariant()
    def no_block_is_two_streams(self) -> None:
        taken = [block for own in self.open if not own.lost for block in range(own.base, own.base + own.blocks)]
        assert len(taken) == len(set(taken)) == self.rooms.total - self.rooms.free
        assert all(0 <= block < self.rooms.total for block in taken)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
