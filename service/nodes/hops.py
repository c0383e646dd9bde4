"""Layers of a step that nodes run whole: a hop is one request and its answer. On the engine's thread."""

from __future__ import annotations

import queue
import time
from array import array
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from colibri.v1 import experts_pb2 as pb
from engine_c import RemoteLayers, RemoteLost
from service.nodes.legs import Leg
from service.nodes.link import Link
from service.nodes.member import Member
from service.nodes.pool import NodePool
from service.spans import show_ranges
from service.wire import enclose

_LAYERS = pb.ExecuteRequest.DESCRIPTOR.fields_by_name["layers"].number
_X = pb.LayerBatch.DESCRIPTOR.fields_by_name["x"].number
_ROW_S = 5e-3  # seconds that a row may take in a layer beyond the timeout, before it is known what it takes
_SLOW = 4.0  # times as long as rows took on average
# A node that is stopped or gone is noticed long before such times: it no longer says what it is (service.nodes.pool).


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
        leg = next(leg for leg in self.legs if leg.first == call.first)
        found = self._pool.link_of(leg.key)
        if found is None:
            raise RemoteLost(f"the node that ran layers {_words(leg)} was lost")
        member, link = found
        number, rows, began = next(self._ids), len(call.x), time.monotonic()
        sequences = [pb.LayerSequence(start=w.start, rows=len(w.tokens), blocks=array("i", w.blocks).tobytes()) for w in call.work]
        message = pb.LayerBatch(id=number, first=leg.first, end=leg.end, sequences=sequences)
        data = call.x.tobytes()
        link.send(enclose(_LAYERS, message, _X, data))
        work = rows * (leg.end - leg.first)
        due = began + max(self._timeout_s + work * _ROW_S, _SLOW * work * member.record.hop_row_s)
        result = self._wait(leg, member, link, number, due)
        if len(result.data) != len(data):
            self._give_up(leg, member, link, f"it answered {len(result.data)} bytes for {rows} rows of {4 * self._hidden} bytes")
        call.x[:] = np.frombuffer(result.data, np.float32).reshape(rows, self._hidden)
        took = time.monotonic() - began
        self.hops += 1
        self.wait_s += took
        record = member.record
        record.hops += 1
        record.hop_rows += work
        record.hop_s += took
        record.compute_s += result.compute_ns / 1e9
        record.sent_bytes += len(data)
        record.received_bytes += len(data)

    def _wait(self, leg: Leg, member: Member, link: Link, number: int, due: float) -> pb.ExpertResult:
        while True:
            try:
                other, response = self._pool.inbox.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                self._give_up(leg, member, link, "it did not answer in time")
            if response is None:
                if other is link:
                    raise RemoteLost(f"node {member.name}, which ran layers {_words(leg)}, was lost")
            elif response.HasField("result"):
                if other is link and response.result.id == number:
                    return response.result
                self.dropped += 1
            elif other is link and response.failed.id == number:
                self._give_up(leg, member, link, f"it did not run layers {_words(leg)}: {response.failed.message}")

    def _give_up(self, leg: Leg, member: Member, link: Link, reason: str) -> NoReturn:
        """Ends a stream, and with it the keys and values of its layers; the node is reached anew. RemoteLost."""
        member.record.failures += 1
        link.end(reason)
        self._pool.forget(link)
        raise RemoteLost(f"node {member.name}, which ran layers {_words(leg)}, was given up: {reason}")


def _words(leg: Leg) -> str:
    return show_ranges([(leg.first, leg.end)])
