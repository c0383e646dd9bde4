"""A step's experts on nodes: hands batches out, takes answers in, sees to it that every one comes. On the engine's thread."""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from colibri.v1 import experts_pb2 as pb
from engine_c import RemoteExperts, RemoteLayers, RemoteLost
from service.faults import LayersElsewhere
from service.nodes.flight import Flight, Row, Sent
from service.nodes.holders import Table
from service.nodes.hops import Hops
from service.nodes.legs import Leg, plan_legs, show_layers
from service.nodes.lifecycle import State
from service.nodes.link import Answer, Link
from service.nodes.pool import NodePool
from service.request import Request
from service.spans import merge_ranges
from service.wire import enclose

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logging.getLogger("colibri.nodes")
HERE = 0
"""Key of this process among the holders, if it holds all experts too."""
_PAIR_S = 1e-3  # seconds that a pair may take beyond the timeout, before it is known what they take
_LONGEST_S = 60.0  # of one wait
_BATCH = pb.ExecuteRequest.DESCRIPTOR.fields_by_name["batch"].number
_DATA = pb.ExpertBatch.DESCRIPTOR.fields_by_name["data"].number
_SLOW = 4.0  # times as long as pairs took on average


class SetsRemote(Protocol):
    """The part of engine_c.Session that is told between steps."""

    def set_remote(self, experts: npt.NDArray[np.bool_] | None, layers: Sequence[tuple[int, int]] = ()) -> None:
        """Which experts are computed elsewhere, and which layers whole."""
        ...


@dataclass(slots=True)
class RemoteTotals:
    """What has been done since the start; only the engine's thread counts."""

    layers: int = 0  # of steps, that had experts on nodes
    wait_s: float = 0.0  # for answers, beyond what was done here meanwhile
    fallback_pairs: int = 0  # computed here since no node that has the expert answered
    dropped: int = 0  # answers that nobody waited for any more


class NodeRemote:
    """engine_c.Remote over a pool. `prepare` before every step."""

    def __init__(
        self,
        pool: NodePool,
        *,
        hidden: int,
        fallback: bool,
        all_here: bool,
        timeout_s: float,
        hedge_s: float,
    ) -> None:
        """fallback: what nobody holds is computed here; all_here: this process holds all and does its part."""
        self.totals = RemoteTotals()
        self._pool = pool
        self._hidden = hidden
        self._fallback = fallback or all_here
        self._all_here = all_here
        self._timeout_s = timeout_s
        self._hedge_s = hedge_s
        self._ids = itertools.count(1)
        self.hops = Hops(pool, self._ids, hidden=hidden, timeout_s=timeout_s)
        self._kv_of: tuple[Leg, ...] = ()  # who has what was computed; the rest of it is here
        self._told: Table | None = None  # what the session was told
        self._missing = ""
        self._flight: Flight | None = None
        self._mine: list[Sent] = []  # what is to be computed here, as one of the holders

    # ------------------------------------------------------------ between steps

    def missing(self) -> str:
        """What keeps steps from being done, in a sentence; "" if nothing does. Any thread."""
        table = self._pool.table
        return "" if self._fallback else self._uncovered(table)

    @property
    def whole_layers(self) -> frozenset[int]:
        """Layers that nodes run whole at this moment. Any thread."""
        return self._pool.table.ranged

    def refusal(self, request: Request) -> LayersElsewhere | None:
        """Why a request can't be computed as it is; None: it can. Any thread."""
        if request.damping is None and not request.trace:
            return None
        layers = self.whole_layers
        return LayersElsewhere(show_layers(layers), trace=request.trace) if layers else None

    def prepare(self, session: SetsRemote) -> bool:
        """Tells the session who is there. True if keys and values of what was computed before can't be used any more: some layers are
        someone else's now. RemoteLost if some experts or layers have nobody who computes them."""
        table = self._pool.table
        if table is not self._told:
            legs = plan_legs(table.holders, table.layers, kept=self.hops.legs)
            session.set_remote(self._mask(table), merge_ranges([(leg.first, leg.end) for leg in legs]))
            self._told, self.hops.legs = table, legs
            self._missing = "" if self._fallback else self._uncovered(table)
        if self._missing:
            raise RemoteLost(self._missing)
        if self.hops.legs == self._kv_of:
            return False
        self._kv_of = self.hops.legs
        log.info("layers run by nodes from here on: %s", show_layers(table.ranged) or "none")
        return True

    def forget_told(self) -> None:
        """Somebody else has told the session who is there: `prepare` tells it anew."""
        self._told = None

    def _mask(self, table: Table) -> npt.NDArray[np.bool_]:
        import numpy as np  # here, as everywhere that a server without nodes comes through when it starts

        experts_of = self._pool.config.experts_of
        mask = np.zeros((table.layers, table.experts), np.bool_)
        for layer, count in enumerate(experts_of):
            mask[layer, :count] = True if not self._fallback else [bool(keys) for keys in table.rows[layer][:count]]
        return mask

    def _uncovered(self, table: Table) -> str:
        what = self._pool.lack(table).first
        if not what:
            return ""
        members = list(self._pool.members.values())
        ready = [m.name for m in members if m.life.shown is State.READY]
        absent = [m for m in members if m.name not in ready]
        others = [f"{m.name} is {m.life.shown.value}{': ' + m.life.reason if m.life.reason else ''}" for m in absent]
        found = [f"{', '.join(ready)} {'is' if len(ready) == 1 else 'are'} ready"] if ready else []
        states = "; ".join([*found, *others]) or self._pool.unresolved or "no node has been found"
        return f"{what}; {states}" + ("" if others or not ready else ": start nodes that hold them, or set nodes_fallback file")

    # ------------------------------------------------------------ a step

    def run_layers(self, call: RemoteLayers) -> None:
        """Has layers run. RemoteLost."""
        self.hops.run(call)

    def send(self, call: RemoteExperts) -> None:
        """Hands batches out; returns at once."""
        self._mine = []
        flight = self._flight = Flight(call.counts, lambda: self._row(call.layer), self._ids, self._patience, hedge=self._hedge_s)
        for sent in flight.start(time.monotonic()):
            self._send(call, sent)

    def receive(self, call: RemoteExperts) -> None:
        """Returns when all outputs are there. RemoteLost if some can't be had."""
        flight = self._flight
        assert flight is not None
        began = time.monotonic()
        while flight.wanted:
            if self._mine:
                self._compute_mine(call, flight)
            elif stranded := flight.stranded:
                self._stand_in(call, flight, stranded)
            else:
                self._wait(call, flight)
        self._flight = None
        self.totals.layers += 1
        self.totals.wait_s += time.monotonic() - began

    def _compute_mine(self, call: RemoteExperts, flight: Flight) -> None:
        for sent in self._mine:
            found = flight.answered(sent.id)
            if found is not None and found[1]:
                call.compute(found[1])
        self._mine = []

    def _wait(self, call: RemoteExperts, flight: Flight) -> None:
        try:
            link, answer = self._pool.inbox.get(timeout=max(0.0, min(flight.next_time() - time.monotonic(), _LONGEST_S)))
        except queue.Empty:
            self._hurry(call, flight)
            return
        if answer is None:
            self._resend(call, link.key)
        elif answer.message.HasField("result"):
            self._put(call, flight, link, answer)
        elif answer.message.failed.id in flight.open:
            self._give_up(call, link, f"it failed a batch: {answer.message.failed.message}")
        else:
            self.totals.dropped += 1

    def _row(self, layer: int) -> Row:
        row = self._pool.table.rows[layer]
        return [(*keys, HERE) for keys in row] if self._all_here else row

    def _patience(self, pairs: int) -> float:
        return self._timeout_s + pairs * _PAIR_S

    def _send(self, call: RemoteExperts, sent: Sent) -> None:
        if sent.key == HERE:
            self._mine.append(sent)
            return
        found = self._pool.link_of(sent.key)
        if found is None:  # it ended a moment ago: no table has it any more
            self._resend(call, sent.key)
            return
        member, link = found
        sent.due = max(sent.due, sent.at + self._timeout_s + _SLOW * member.record.pair_s * sent.pairs)
        batch = call.pack(sent.experts)
        message = pb.ExpertBatch(
            id=sent.id,
            layer=batch.layer,
            experts=batch.experts,
            counts=batch.counts,
            dtype=pb.DATA_TYPE_PREPARED,
            rows=batch.n_rows,
            row_of_pair=bytes(batch.row_of_pair),
            input_weights=bytes(batch.weights),
        )
        member.record.sent_bytes += len(batch.rows)
        link.send(enclose(_BATCH, message, _DATA, batch.rows))

    def _put(self, call: RemoteExperts, flight: Flight, link: Link, answer: Answer) -> None:
        result, data = answer.message.result, answer.data
        sent = flight.open.get(result.id)
        if sent is None or sent.key != link.key:
            self.totals.dropped += 1
            return
        size = 4 * self._hidden
        if len(data) != sent.pairs * size:
            self._give_up(call, link, f"it answered {len(data)} bytes for {sent.pairs} outputs of {size} bytes")
            return
        found = flight.answered(result.id)
        assert found is not None
        self._record(link, sent, result)
        if len(found[1]) == len(sent.experts):
            call.put(sent.experts, data)
            return
        at = 0
        for expert in sent.experts:
            end = at + call.counts[expert] * size
            if expert in found[1]:
                call.put((expert,), data[at:end])
            at = end

    def _record(self, link: Link, sent: Sent, result: pb.ExpertResult) -> None:
        found = self._pool.link_of(link.key)
        if found is not None:
            record = found[0].record
            record.batches += 1
            record.pairs += sent.pairs
            record.received_bytes += 4 * self._hidden * sent.pairs
            record.round_trip_s += time.monotonic() - sent.at
            record.compute_s += result.compute_ns / 1e9

    # ------------------------------------------------------------ when something is wrong

    def _resend(self, call: RemoteExperts, key: int) -> None:
        assert self._flight is not None
        for again in self._flight.lose(key, time.monotonic()):
            self._send(call, again)

    def _give_up(self, call: RemoteExperts, link: Link, reason: str) -> None:
        """Ends a stream; its node is reached anew. What it was to do is done by others."""
        found = self._pool.link_of(link.key)
        if found is not None:
            found[0].record.failures += 1
        link.end(reason)
        self._pool.forget(link)
        self._resend(call, link.key)

    def _hurry(self, call: RemoteExperts, flight: Flight) -> None:
        now = time.monotonic()
        known = len(flight.hedged)
        for sent in flight.hedges(now):
            self._send(call, sent)
        for key in flight.hedged[known:]:
            if found := self._pool.link_of(key):
                found[0].record.hedges += 1
        for key in flight.late(now):
            found = self._pool.link_of(key)
            if found is None:
                self._resend(call, key)
            else:
                self._give_up(call, found[1], f"it did not answer for {self._timeout_s:g} s")

    def _stand_in(self, call: RemoteExperts, flight: Flight, experts: Sequence[int]) -> None:
        """Nobody that is there holds these."""
        if not self._fallback:
            raise RemoteLost(self._uncovered(self._pool.table) or f"the nodes that hold experts of layer {call.layer} were lost")
        call.compute(experts)
        flight.done(experts)
        self.totals.fallback_pairs += sum(call.counts[expert] for expert in experts)
