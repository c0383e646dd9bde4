"""Whom a model serves right now: calls counted for draining, streams by request, news handed to them. On the loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.engine import EngineThread
from service.faults import Draining, Fault, NodesLost, WorkersLost
from service.plan import Update
from service.request import Request
from service.streams import Stream


class Desk:
    """One for a model."""

    def __init__(self, engine: EngineThread, *, stream_limit: int, stream_patience: float) -> None:
        self._engine = engine
        self._limit = stream_limit
        self._patience = stream_patience
        self._streams: dict[str, Stream] = {}
        self._calls = 0
        self.tokens = 0  # generated so far
        self.unable = ""  # why nothing will be computed for long; "": it will
        self.nodes_lost: Callable[[], str] | None = None  # what nodes lack at this moment, if that is why
        self.going = asyncio.Event()  # set with the first drain
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def calls(self) -> int:
        """Calls being answered."""
        return self._calls

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Requests accepted and not yet over with."""
        return tuple(self._streams.values())

    @property
    def draining(self) -> bool:
        """Nothing new is taken."""
        return self.going.is_set()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts a call while it is answered. Raises Draining once the server is on its way down."""
        if self.going.is_set():
            raise Draining
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    @contextmanager
    def stream(self, request: Request) -> Iterator[Stream]:
        """Submits a request (or raises the Fault that says why not); whatever ends the block, nothing of it is computed afterwards."""
        if self.unable and self.nodes_lost is None:
            raise WorkersLost(ran=False, sentence=self.unable)
        if self.unable and self.nodes_lost is not None and (lacking := self.nodes_lost()):
            raise NodesLost(ran=False, sentence=lacking)
        stream = Stream(request, limit=self._limit, patience=self._patience, on_overflow=self._engine.abort)
        self._engine.submit(request)
        self._streams[request.id] = stream
        try:
            yield stream
        finally:
            del self._streams[request.id]
            if not stream.over:
                self._engine.abort(request.id)

    def deliver(self, updates: list[Update]) -> None:
        """News from the engine. Those of a request whose caller has gone are dropped."""
        touched: dict[str, Stream] = {}
        for update in updates:
            stream = self._streams.get(update.request.id)
            if stream is not None:
                self.tokens += 0 if update.request.score else len(update.rows)
                stream.push(update)
                touched[update.request.id] = stream
        for stream in touched.values():
            stream.announce()

    def drain(self) -> None:
        """Takes nothing new from now on."""
        self.going.set()
        self._engine.drain()

    async def wait_idle(self, timeout: float) -> bool:
        """Waits until every call has been answered; False if some have not in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def break_off(self, fault_of: Callable[[Request], Fault]) -> None:
        """Ends what is left, each with its own fault."""
        for stream in self.streams:
            self._engine.abort(stream.request.id)
            stream.push(Update(stream.request, fault=fault_of(stream.request)))
            stream.announce()
