"""A node from when its address is first seen until it is no longer: the thread that reaches it, again and again, and what it has done."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from colibri.v1 import node_pb2
from service.nodes.addresses import Place
from service.nodes.holders import Holder
from service.nodes.lifecycle import Life, State
from service.nodes.link import HELLO_S, Answer, Identity, Link, Refused, Unreachable
from service.spans import Range, show_ranges

log = logging.getLogger("colibri.nodes")
_GRIEVANCE_S = 1.0  # seconds for a node to hear, and to log, why it is refused
_RECENT_S = 60.0  # that a rate is of


@dataclass(slots=True)
class Record:
    """What a node has done for us; only the engine's thread counts. Seconds where the name says so."""

    batches: int = 0
    pairs: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    round_trip_s: float = 0.0
    compute_s: float = 0.0
    hops: int = 0  # batches of layers it ran
    hop_rows: int = 0  # rows of them, each as often as there were layers
    hop_s: float = 0.0
    hedges: int = 0  # batches asked of another too, for it was slow
    failures: int = 0  # batches it did not answer rightly
    looks: deque[tuple[float, int]] = field(default_factory=deque)  # at the pairs, of the last minute; only the pool's thread adds any

    def look(self, now: float) -> None:
        """For the rate, about once a second."""
        self.looks.append((now, self.pairs))
        while self.looks[0][0] < now - _RECENT_S:
            self.looks.popleft()

    @property
    def rate(self) -> float:
        """Pairs a second in the last minute, or since it is known if that is less."""
        looks = tuple(self.looks)
        seconds = looks[-1][0] - looks[0][0] if looks else 0.0
        return (looks[-1][1] - looks[0][1]) / seconds if seconds > 0 else 0.0

    @property
    def pair_s(self) -> float:
        """Seconds a pair has taken, on average."""
        return self.round_trip_s / self.pairs if self.pairs else 0.0

    @property
    def hop_row_s(self) -> float:
        """Seconds a row has taken in a layer, on average."""
        return self.hop_s / self.hop_rows if self.hop_rows else 0.0


class Pool(Protocol):
    """What a member tells."""

    def admit(self, member: Member, link: Link) -> None:
        """It is to be used from now on. Refused."""
        ...

    def changed(self) -> None:
        """What it holds, or whether it is to be used, is another."""
        ...

    def told(self, link: Link, answer: Answer) -> None:
        """It has answered."""
        ...

    def lost(self, link: Link) -> None:
        """It answers no more."""
        ...


@dataclass(slots=True)
class Member:
    """Its own thread changes it; the rest is read by any."""

    place: Place
    pool: Pool
    dial: Callable[[str], Link]
    identity: Identity
    why_no_tls: Callable[[str], str]  # what TLS has against an address; "": nothing
    life: Life = field(default_factory=lambda: Life(time.monotonic()))
    link: Link | None = None
    description: node_pb2.NodeDescription = field(default_factory=node_pb2.NodeDescription)
    record: Record = field(default_factory=Record)
    held: frozenset[tuple[int, int]] = frozenset()
    ranges: tuple[Range, ...] = ()  # of layers that it runs whole
    _told: int = 0  # times it was told what to hold, or said so
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The node's own; the address as long as it has not told."""
        return self.description.name or str(self.place)

    @property
    def holder(self) -> Holder | None:
        """As the table has it; None if it is not to be asked. One that is draining does what it alone holds until others have it."""
        link, state = self.link, self.life.state
        leaving = state is State.DRAINING and self.description.assignable
        if link is None or not (leaving or state is State.READY):
            return None
        return Holder(link.key, self.name, self.held, self.ranges, leaving=leaving)

    def start(self) -> None:
        """Begins to reach it."""
        self._thread = threading.Thread(target=self._run, name=f"node-{self.place}"[:40], daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Its address means it no longer; returns at once."""
        self._stopping.set()
        link = self.link
        if link is not None:
            link.end("it is no longer among the nodes")

    def join(self, timeout: float) -> None:
        """Waits for its thread."""
        if self._thread is not None:
            self._thread.join(timeout)

    def narrow(self, pairs: frozenset[tuple[int, int]]) -> None:
        """It is about to be told to hold no more than these: nothing else is asked of it from now on, until it says what it holds."""
        with self._lock:
            self._told += 1
            narrower = not self.held <= pairs
            self.held &= pairs
        if narrower:
            self.pool.changed()

    def hear(self, told: int, description: node_pb2.NodeDescription) -> None:
        """`describe`, if it was not told to hold something else since it was asked."""
        if told == self._told:
            self.describe(description)

    def ask(self, timeout: float) -> None:
        """Asks what it is now; returns at once."""
        self.record.look(time.monotonic())
        self._ask(timeout)

    def _ask(self, timeout: float) -> None:
        link = self.link
        if link is not None and self.life.state in (State.READY, State.DRAINING):
            again = partial(self._ask, timeout)
            link.ask(partial(self.hear, self._told), again, known=self.description.revision, timeout=timeout)

    def describe(self, description: node_pb2.NodeDescription) -> None:
        """Takes in what it says of itself now. Any thread."""
        with self._lock:
            if self.description.instance == description.instance and description.revision < self.description.revision:
                return  # overtaken
            self._told += 1
            if self.description.name not in ("", description.name):  # another node has its address now
                self.record, self.life.losses = Record(), 0
            self.description = description
            held = frozenset((share.layer, expert) for share in description.shares for expert in share.experts)
            ranges = tuple((part.first, part.end) for part in description.layer_ranges)
            same, self.held, self.ranges = (held, ranges) == (self.held, self.ranges), held, ranges
            draining = description.state == node_pb2.NODE_STATE_DRAINING
            if self.life.state is State.READY and draining:
                self._say(State.DRAINING, "it is shutting down")
            elif same:
                return
        self.pool.changed()

    # ------------------------------------------------------------ its thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            link = self.link = self.dial(str(self.place))
            try:
                self._reach(link)
            except Refused as refusal:
                self._say(State.REFUSED, str(refusal))
            except Unreachable as failure:
                self._give_up(str(failure), look=not failure.silent)
            except Exception:
                log.exception("node %s: a bug of ours", self.name)
                self._give_up("a bug of ours; the log has it", look=False)
            finally:
                self.link = None
                self.pool.lost(link)
                link.close()
            self._stopping.wait(self.life.pause())
            if not self._stopping.is_set():
                self._say(State.CONNECTING, "")
        self._say(State.GONE, "")

    def _reach(self, link: Link) -> None:
        """Returns never: the end of what it does for us is told by Unreachable."""
        self.describe(link.describe())
        if reason := self.identity.why_not(self.description):
            link.open(self.identity, timeout=_GRIEVANCE_S)  # so that it says so on its side too
            link.read(lambda _: link.end(reason))
            raise Refused(reason)
        if self.description.state == node_pb2.NODE_STATE_DRAINING:
            raise Unreachable("it is shutting down")
        link.open(self.identity)
        watch = threading.Timer(HELLO_S, link.end, ("it did not take the stream",))
        watch.daemon = True
        watch.start()

        def told(answer: Answer) -> None:
            if answer.message.WhichOneof("kind") != "opened":
                self.pool.told(link, answer)
            elif watch.finished.is_set():
                link.end("it opened the stream twice")
            else:
                watch.cancel()
                self._open(link, answer.message.opened)

        try:
            reason = link.read(told)
            raise (Refused if link.refused and self.life.state is State.CONNECTING else Unreachable)(reason)
        finally:
            watch.cancel()

    def _open(self, link: Link, description: node_pb2.NodeDescription) -> None:
        self.describe(description)
        if reason := self.identity.why_not(description):
            raise Refused(reason)  # another process than the one that described itself
        self.pool.admit(self, link)
        with self._lock:
            self.life.move(State.READY, time.monotonic())
        layers = len({layer for layer, _ in self.held})
        what = f"runs layers {show_ranges(self.ranges)}" if self.ranges else f"holds {len(self.held)} experts of {layers} layers"
        log.info("node %s at %s computes for us: it %s", self.name, self.place, what)
        self.pool.changed()

    def _give_up(self, reason: str, *, look: bool) -> None:
        if trouble := self.why_no_tls(str(self.place)) if look and self.life.state is State.CONNECTING else "":
            self._say(State.REFUSED, trouble)
        else:
            self._say(State.LOST, reason)

    def _say(self, state: State, reason: str) -> None:
        """Changes state and says so, once."""
        with self._lock:
            news = self.life.move(state, time.monotonic(), reason)
        if not news or not reason or self._stopping.is_set():
            return
        if state is State.LOST and self.life.left:
            log.info("node %s at %s has left", self.name, self.place)
            return
        level = logging.INFO if state is State.DRAINING else logging.WARNING
        what = "not reached yet" if state is State.LOST and not self.description.name else state.value
        log.log(level, "node %s at %s is %s: %s", self.name, self.place, what, reason)
