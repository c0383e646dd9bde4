"""Layers of a step that nodes run whole: a hop is one request and its answer. On the engine's thread.

Where nodes run layers that follow one another, many rows go in pieces, so that the second node works on the first piece while the first
node works on the next. A row's bits do not depend on the others that it is computed with.
"""

from __future__ import annotations

import queue
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from colibri.v1 import experts_pb2 as pb
from engine_c import RemoteLayers, RemoteLost
from service.nodes.legs import Leg
from service.nodes.link import Answer, Link
from service.nodes.member import Member
from service.nodes.pieces import Piece, cut
from service.nodes.pool import NodePool
from service.spans import show_ranges
from service.wire import enclose

_LAYERS = pb.ExecuteRequest.DESCRIPTOR.fields_by_name["layers"].number
_X = pb.LayerBatch.DESCRIPTOR.fields_by_name["x"].number
_ROW_S = 5e-3  # seconds that a row may take in a layer beyond the timeout, before it is known what it takes
_SLOW = 4.0  # times as long as rows took on average
# A node that is stopped or gone is noticed long before such times: it no longer says what it is (service.nodes.pool).


@dataclass(slots=True)
class Hop:
    """A piece on its way through leg number `leg` of the call's. began: when its node was free to begin; due: given up then."""

    piece: Piece
    leg: int
    member: Member
    link: Link
    began: float
    due: float


class Hops:
    """`legs` say whom to ask; they change between steps."""

    def __init__(self, pool: NodePool, ids: Iterator[int], *, hidden: int, timeout_s: float) -> None:
        self.legs: tuple[Leg, ...] = ()
        self.hops = 0  # answered
        self.wait_s = 0.0  # for them
        self.dropped = 0  # answers that nobody waited for any more
        self._pool = pool
        self._ids = ids
        self._hidden = hidden
        self._timeout_s = timeout_s

    def run(self, call: RemoteLayers) -> None:
        """Has layers run by whoever has them. RemoteLost."""
        legs = [leg for leg in self.legs if call.first <= leg.first < call.end]
        began = time.monotonic()
        under_way: dict[int, Hop] = {}  # as they were sent
        for piece in cut(call.work, len(legs)):
            self._send(call, under_way, legs, piece, 0)
        while under_way:
            hop = self._next(call, under_way, legs)
            if hop.leg + 1 < len(legs):
                self._send(call, under_way, legs, hop.piece, hop.leg + 1)
        self.wait_s += time.monotonic() - began

    def _send(self, call: RemoteLayers, under_way: dict[int, Hop], legs: Sequence[Leg], piece: Piece, number: int) -> None:
        leg = legs[number]
        found = self._pool.link_of(leg.key)
        if found is None:
            raise RemoteLost(f"the node that ran layers {_words(leg)} was lost")
        member, link = found
        sequences = [pb.LayerSequence(start=s.start, rows=s.rows, blocks=array("i", s.blocks).tobytes()) for s in piece.spans]
        message = pb.LayerBatch(id=next(self._ids), first=leg.first, end=leg.end, sequences=sequences)
        data = call.x[piece.first : piece.end].tobytes()
        link.send(enclose(_LAYERS, message, _X, data))
        member.record.sent_bytes += len(data)
        now = time.monotonic()
        before = max((hop.due for hop in under_way.values() if hop.link is link), default=now)
        under_way[message.id] = Hop(piece, number, member, link, now, before + self._patience(member, _work(piece, leg)))

    def _patience(self, member: Member, work: int) -> float:
        return max(self._timeout_s + work * _ROW_S, _SLOW * work * member.record.hop_row_s)

    def _next(self, call: RemoteLayers, under_way: dict[int, Hop], legs: Sequence[Leg]) -> Hop:
        """Takes the next answer in."""
        number, answer = self._wait(under_way, legs)
        hop = under_way.pop(number)
        rows = hop.piece.end - hop.piece.first
        if len(answer.data) != 4 * self._hidden * rows:
            self._give_up(legs[hop.leg], hop, f"it answered {len(answer.data)} bytes for {rows} rows of {4 * self._hidden} bytes")
        call.x[hop.piece.first : hop.piece.end] = np.frombuffer(answer.data, np.float32).reshape(rows, self._hidden)
        now = time.monotonic()
        self._record(hop, answer, _work(hop.piece, legs[hop.leg]), now)
        after = _oldest(under_way, hop.link)
        if after is not None:
            under_way[after].began = now
        return hop

    def _record(self, hop: Hop, answer: Answer, work: int, now: float) -> None:
        self.hops += 1
        record = hop.member.record
        record.hops += 1
        record.hop_rows += work
        record.hop_s += now - hop.began
        record.compute_s += answer.message.result.compute_ns / 1e9
        record.received_bytes += len(answer.data)

    def _wait(self, under_way: dict[int, Hop], legs: Sequence[Leg]) -> tuple[int, Answer]:
        while True:
            first = min(under_way.values(), key=lambda hop: hop.due)
            try:
                link, answer = self._pool.inbox.get(timeout=max(0.0, first.due - time.monotonic()))
            except queue.Empty:
                self._give_up(legs[first.leg], first, "it did not answer in time")
            number = _oldest(under_way, link)
            if number is None:
                self.dropped += answer is not None
                continue
            hop, leg = under_way[number], legs[under_way[number].leg]
            if answer is None:
                raise RemoteLost(f"node {hop.member.name}, which ran layers {_words(leg)}, was lost")
            result = answer.message.HasField("result")
            told = answer.message.result.id if result else answer.message.failed.id
            if told == number and result:
                return number, answer
            if told == number:
                self._give_up(leg, hop, f"it did not run layers {_words(leg)}: {answer.message.failed.message}")
            if told in under_way:  # what comes later in a sequence reads the keys and values of what comes earlier
                self._give_up(leg, hop, "it answered out of turn")
            self.dropped += 1

    def _give_up(self, leg: Leg, hop: Hop, reason: str) -> NoReturn:
        """Ends a stream, and with it the keys and values of its layers; the node is reached anew. RemoteLost."""
        hop.member.record.failures += 1
        hop.link.end(reason)
        self._pool.forget(hop.link)
        raise RemoteLost(f"node {hop.member.name}, which ran layers {_words(leg)}, was given up: {reason}")


def _oldest(under_way: dict[int, Hop], link: Link) -> int | None:
    """What a node is to answer next: it works in the order in which it was asked."""
    return next((number for number, hop in under_way.items() if hop.link is link), None)


def _work(piece: Piece, leg: Leg) -> int:
    return (piece.end - piece.first) * (leg.end - leg.first)


def _words(leg: Leg) -> str:
    return show_ranges([(leg.first, leg.end)])
