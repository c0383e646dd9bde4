"""Between the engine thread and one caller: a bounded queue of news, on the event loop.

The engine is never held up by a caller. What a caller has not taken adds up; news taken together are handed over together, so one slow
write costs one message, not one a token. A caller that has stopped reading shows in a write that does not return: once it has taken
too long and too much has added up behind it, the request is called off and its memory is free at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from service.faults import ClientTooSlow
from service.plan import Update
from service.request import Request


class Stream:
    """News of one request. Used from the loop alone."""

    def __init__(self, request: Request, *, limit: int, patience: float, on_overflow: Callable[[str], object]) -> None:
        """`limit`: tokens; `patience`: seconds a write may take while more than that wait behind it."""
        self.request = request
        self._limit = limit
        self._patience = patience
        self._write_began: float | None = None
        self._on_overflow = on_overflow
        self._held: list[Update] = []
        self._held_tokens = 0
        self._over = False
        self._ready = asyncio.Event()

    @property
    def over(self) -> bool:
        """The last news has arrived, taken or not."""
        return self._over

    def push(self, update: Update) -> None:
        """More news. Nothing is taken after the end."""
        if self._over:
            return
        self._held_tokens += 0 if self.request.score else len(update.rows)
        if self._held_tokens > self._limit and self._stuck():
            self._on_overflow(self.request.id)
            update = Update(self.request, fault=ClientTooSlow(self._limit))
            self._held.clear()
        self._held.append(update)
        self._over = update.final
        self._ready.set()

    async def send(self, write: Awaitable[object]) -> None:
        """Waits for a write to the caller, and keeps the time."""
        self._write_began = time.monotonic()
        try:
            await write
        finally:
            self._write_began = None

    def _stuck(self) -> bool:
        return self._write_began is not None and time.monotonic() - self._write_began > self._patience

    async def take(self) -> list[Update]:
        """All news there is; waits for some."""
        await self._ready.wait()
        self._ready.clear()
        taken, self._held = self._held, []
        self._held_tokens = 0
        return taken
