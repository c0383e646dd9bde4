"""Between the engine thread and one caller: a bounded queue of news, and the writing of messages. On the event loop.

The engine is never held up by a caller. What a caller has not taken adds up; news taken together are handed over together, so one slow
write costs one message, not one a token. A caller that has stopped reading shows in a write that does not return: once it has taken
too long and too much has added up behind it, the request is called off and its memory is free at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from service.faults import ClientTooSlow
from service.plan import Update
from service.request import Request


class Writer:
    """Writes one message after the other without a task for it: a write is a coroutine that runs until the transport has the message and
    then waits for room. Switching to a task twice for every token costs more than making the message."""

    def __init__(self, write: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self._write = write
        self._running: Coroutine[Any, Any, None] | None = None
        self._waits_for: asyncio.Future[Any] | None = None
        self._began = 0.0

    def idle(self) -> bool:
        """Whether the last message has been taken. Raises what its write raised."""
        while self._running is not None:
            if self._waits_for is not None and not self._waits_for.done():
                return False
            self._advance()
        return True

    @property
    def seconds(self) -> float:
        """How long the message that is being written has taken so far."""
        waits = self._waits_for is not None and not self._waits_for.done()
        return time.monotonic() - self._began if waits else 0.0

    def start(self, message: object) -> None:
        """Begins to write, once idle. Raises what the write raises."""
        self._began = time.monotonic()
        self._running = self._write(message)
        self._advance()

    def then(self, call: Callable[[], object]) -> None:
        """Has something called when the message that is being written has been taken."""
        assert self._waits_for is not None
        self._waits_for.add_done_callback(lambda _: call())

    async def finish(self) -> None:
        """Waits until idle. Raises what the write raises."""
        while not self.idle():
            assert self._waits_for is not None
            await asyncio.wait((self._waits_for,))

    def abandon(self) -> None:
        """Nobody waits any more; what was begun is still brought to its end, which gives native memory back."""
        with contextlib.suppress(Exception):  # the caller has gone, and its call has ended with that
            if not self.idle():
                self.then(self.abandon)

    def _advance(self) -> None:
        assert self._running is not None
        try:
            self._waits_for = self._running.send(None)
        except BaseException as end:
            self._running = self._waits_for = None
            if not isinstance(end, StopIteration):
                raise


class Stream:
    """News of one request. Used from the loop alone: by a task that takes them, or by a listener that is called when there are some."""

    def __init__(self, request: Request, *, limit: int, patience: float, on_overflow: Callable[[str], object]) -> None:
        """`limit`: tokens; `patience`: seconds a write may take while more than that wait behind it."""
        self.request = request
        self.writer: Writer | None = None
        self._limit = limit
        self._patience = patience
        self._on_overflow = on_overflow
        self._listener: Callable[[], None] | None = None
        self._held: list[Update] = []
        self._held_tokens = 0
        self._over = False
        self._ready = asyncio.Event()

    @property
    def over(self) -> bool:
        """The last news has arrived, taken or not."""
        return self._over

    def push(self, update: Update) -> None:
        """More news; `announce` when all of them are here. Nothing is taken after the end."""
        if self._over:
            return
        self._held_tokens += 0 if self.request.score else len(update.rows)
        if self._held_tokens > self._limit and self._stuck():
            self._on_overflow(self.request.id)
            update = Update(self.request, fault=ClientTooSlow(self._limit))
            self._held.clear()
        self._held.append(update)
        self._over = update.final

    def announce(self) -> None:
        """Says that there are news."""
        if self._listener is not None:
            self._listener()
        else:
            self._ready.set()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Who is told from now on; told at once if there are news already."""
        self._listener = listener
        if listener is not None and self._held:
            listener()

    async def take(self) -> list[Update]:
        """All news there is; waits for some."""
        await self._ready.wait()
        self._ready.clear()
        return self.take_held()

    def take_held(self) -> list[Update]:
        """All news there is."""
        taken, self._held = self._held, []
        self._held_tokens = 0
        return taken

    def _stuck(self) -> bool:
        return self.writer is not None and self.writer.seconds > self._patience
