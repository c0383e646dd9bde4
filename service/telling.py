"""An answer on its way to its caller: news in, messages out, as a callback of the loop rather than a task that is woken for each token."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from service.messages import Narrator
from service.metrics import ModelMetrics
from service.streams import Stream, Writer


class Teller:
    """Writes the deltas of one answer as its news come. `async with` it around `ended()`; what it has left is `narrator.take_delta()`'s.

    A message that the caller has not taken when more comes is followed by one with everything that has come meanwhile.
    """

    def __init__(self, narrator: Narrator, stream: Stream, writer: Writer, metrics: ModelMetrics, *, streaming: bool) -> None:
        """streaming False: nothing is written; all of it is left at the end."""
        self._narrator = narrator
        self._stream = stream
        self._writer = stream.writer = writer
        self._metrics = metrics
        self._streaming = streaming
        self._waiting = False
        self._last: float | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Teller:
        self._stream.listen(self._hear)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.listen(None)
        self._writer.abandon()

    async def ended(self) -> None:
        """Returns when the answer is over and every message begun has been taken; raises what a write raised."""
        await self._ended
        await self._writer.finish()

    def _hear(self) -> None:
        """There are news. While the caller has yet to take a message they stay in the stream, which knows how much it may hold."""
        if self._ended.done() or self._waiting:
            return
        try:
            if not self._writer.idle():
                self._waiting = True
                self._writer.then(self._taken)
                return
            self._absorb()
            if self._narrator.ended:
                self._ended.set_result(None)
            elif self._streaming and (message := self._narrator.take_delta()) is not None:
                self._writer.start(message)
        except Exception as error:
            self._ended.set_exception(error)

    def _absorb(self) -> None:
        narrator, now = self._narrator, time.monotonic()
        before = narrator.tokens
        narrator.absorb(self._stream.take_held())
        count = narrator.tokens - before
        if self._last is not None and count:
            self._metrics.inter_token.observe((now - self._last) / count, count)
        self._last = now

    def _taken(self) -> None:
        """The caller has taken the last message, and more had come by then."""
        self._waiting = False
        self._hear()
