"""Layers that a node runs for front ends: whose KV blocks are whose, and requests checked as they come from the wire. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from colibri.v1 import experts_pb2 as pb
from engine_c import KV_BLOCK
from engine_c.structs import SeqWork
from service.node.batches import BatchError
from service.spans import Range

Floats = npt.NDArray[np.float32]
_MAX_SEQS = 4096  # of a message: what a front end's step has at the most


class NoRoom(Exception):
    """The KV blocks a stream wants are not there; the sentence says what to do."""


@dataclass(slots=True)
class Room:
    """A stream's KV blocks: `blocks` of the node's from `base` on. lost: another stream has them now. tables: of the sequences of its last
    request, by place, as bytes and as numbers of the node's: most requests name the same ones, a little longer."""

    owner: str
    instance: str
    base: int
    blocks: int
    lost: bool = False
    tables: list[tuple[bytes, list[int]]] = field(default_factory=list)

    def table(self, place: int, raw: bytes) -> list[int]:
        """The node's numbers of blocks. The list is the one given for this place before, if the sequence goes on. BatchError."""
        known, numbers = self.tables[place] if place < len(self.tables) else (b"", [])
        if not numbers or not raw.startswith(known):
            known, numbers = b"", []
        if raw != known:
            if len(raw) % 4:
                raise BatchError(f"sequences: blocks of {len(raw)} bytes are no 32-bit numbers")
            new = array("i", raw[len(known) :])
            if new and not 0 <= min(new) <= max(new) < self.blocks:
                raise BatchError(f"sequences: there are no KV blocks {min(new)} to {max(new)}, the stream has {self.blocks}")
            numbers.extend(self.base + block for block in new)
        if place < len(self.tables):
            self.tables[place] = raw, numbers
        else:
            self.tables.append((raw, numbers))
        return numbers


@dataclass(slots=True)
class Rooms:
    """Who has which of a node's KV blocks. Not thread-safe: its owner locks."""

    total: int
    taken: list[Room] = field(default_factory=list)  # by base

    @property
    def free(self) -> int:
        """Blocks that are nobody's."""
        return self.total - sum(room.blocks for room in self.taken)

    def take(self, blocks: int, *, owner: str, instance: str = "") -> Room:
        """So many blocks for a stream. An earlier stream of the same process loses its own. NoRoom."""
        for room in [room for room in self.taken if instance and room.instance == instance]:
            room.lost = True
            self.give(room)
        gaps = self._gaps()
        base = next((begin for begin, end in gaps if end - begin >= blocks), None)
        if base is None:
            raise NoRoom(self._why(blocks, max((end - begin for begin, end in gaps), default=0)))
        room = Room(owner, instance, base, blocks)
        self.taken = sorted([*self.taken, room], key=lambda room: room.base)
        return room

    def give(self, room: Room) -> None:
        """Back. One that was lost has been given back already."""
        self.taken = [other for other in self.taken if other is not room]

    def _gaps(self) -> list[Range]:
        at, gaps = 0, []
        for room in self.taken:
            gaps.append((at, room.base))
            at = room.base + room.blocks
        return [*gaps, (at, self.total)]

    def _why(self, blocks: int, most: int) -> str:
        owners = "; ".join(f"{room.owner} has {room.blocks}" for room in self.taken)
        there = f"of this node's {self.total} at most {most} are free in one piece ({owners})" if owners else f"this node has {self.total}"
        return f"{blocks} KV blocks are wanted, {there}: give the node more kv_memory, or the front end less"


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A checked request."""

    first: int
    end: int
    sequences: tuple[SeqWork, ...]
    x: Floats

    def pieces(self, max_rows: int, max_seqs: int) -> Iterator[tuple[list[SeqWork], Floats]]:
        """The sequences and rows, in parts that a session takes, one after the other."""
        if len(self.x) <= max_rows and len(self.sequences) <= max_seqs:
            yield list(self.sequences), self.x
            return
        piece: list[SeqWork] = []
        at = begin = 0
        for whole in self.sequences:
            for part in _cut(whole, max_rows):
                if len(piece) == max_seqs or at - begin + len(part.tokens) > max_rows:
                    yield piece, self.x[begin:at]
                    piece, begin = [], at
                piece.append(part)
                at += len(part.tokens)
        yield piece, self.x[begin:at]


def _cut(work: SeqWork, max_rows: int) -> Iterator[SeqWork]:
    for at in range(0, len(work.tokens), max_rows):
        tokens = work.tokens[at : at + max_rows]
        yield SeqWork(tokens, work.start + at, work.blocks, min(1, work.n_logits), routes=False)


def check_layers(message: pb.LayerBatch, *, hidden: int, ranges: Sequence[Range], context: int, room: Room | None) -> LayerWork:
    """What a message asks for. ranges: layers that are held. context: positions there are. room: the stream's KV blocks. BatchError."""
    if room is None:
        raise BatchError("layers: the stream was opened without kv_blocks")
    if room.lost:
        raise BatchError("layers: another stream of the same front end has taken over the KV blocks of this one")
    if not any(first <= message.first < message.end <= end for first, end in ranges):
        raise BatchError(f"first, end: layers {message.first} to {message.end} are not within those held here")
    data = message.x
    rows = _count_rows(message.sequences, len(data), hidden)  # before anything is made that is as large as they say
    sequences = tuple(_sequence(place, part, context, room) for place, part in enumerate(message.sequences))
    del room.tables[len(sequences) :]
    _check_apart(sequences)
    return LayerWork(message.first, message.end, sequences, np.frombuffer(data, np.float32).reshape(rows, hidden))


def _count_rows(sequences: Sequence[pb.LayerSequence], length: int, hidden: int) -> int:
    if not sequences:
        raise BatchError("sequences: at least one is needed")
    if len(sequences) > _MAX_SEQS:
        raise BatchError(f"sequences: there are {len(sequences)}, at most {_MAX_SEQS} are taken at a time")
    rows = sum(part.rows for part in sequences)
    if length != 4 * rows * hidden:
        raise BatchError(f"x: its length is {length} bytes, {rows} rows of {hidden} elements take {4 * rows * hidden}")
    return rows


def _sequence(place: int, part: pb.LayerSequence, context: int, room: Room) -> SeqWork:
    start, rows = part.start, part.rows
    if rows < 1 or start + rows > context:
        raise BatchError(f"sequences: positions {start} to {start + rows} are not 1 or more of the context's {context}")
    raw = part.blocks
    if len(raw) > 4 * -(-context // KV_BLOCK):
        raise BatchError(f"sequences: {len(raw) // 4} KV blocks are more than the context of {context} positions takes")
    blocks = room.table(place, raw)
    if len(blocks) * KV_BLOCK < start + rows:
        raise BatchError(f"sequences: {len(blocks)} KV blocks do not hold {start + rows} positions")
    return SeqWork((0,) * rows, start, blocks, 1)


def _check_apart(sequences: Sequence[SeqWork]) -> None:
    """The block that a sequence writes to must be no other's: which of them came last would decide."""
    written = sorted(block for s in sequences for block in s.blocks[s.start // KV_BLOCK : -(-(s.start + len(s.tokens)) // KV_BLOCK)])
    if any(a == b for a, b in pairwise(written)):
        raise BatchError("sequences: two write to the same KV block")
