"""Work that is no step and needs the session all the same: it runs on the engine's thread, one piece before each step.

So a flood of it lengthens what lies between two steps by one piece, and never keeps tokens from going on. Pieces are short by their size:
whoever adds one bounds its rows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from service.faults import Fault, QueueFull

_Result = TypeVar("_Result")
_RETRY_AFTER = 0.1  # seconds: a full queue is worked off in about so long


class Guests:
    """A queue of such work. `add` from any thread, `run_one` on the engine's."""

    def __init__(self, most: int = 256) -> None:
        """`most`: pieces that may wait."""
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._closed: Fault | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Queues a piece; what it returns or raises is the future's. One that is cancelled before its turn is not run. QueueFull, and the
        Fault that `close` was given."""
        answer: Future[_Result] = Future()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if len(self._waiting) >= self._most:
                raise QueueFull(f"{self._most} calls wait for the engine already; try again soon", retry_after=_RETRY_AFTER)
            self._waiting.append(lambda: self._run(work, answer))
        return answer

    def run_one(self) -> bool:
        """Runs the piece that has waited longest; False if there is none."""
        with self._lock:
            piece = self._waiting.popleft() if self._waiting else None
        if piece is not None:
            piece()
        return piece is not None

    def close(self, fault: Fault) -> None:
        """No piece runs any more: those that wait, and those that come, get the fault."""
        with self._lock:
            self._closed = fault
            left = list(self._waiting)
            self._waiting.clear()
        for piece in left:
            piece()

    def _run(self, work: Callable[[], _Result], answer: Future[_Result]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            if self._closed is not None:
                raise self._closed
            result = work()
        except BaseException as error:
            answer.set_exception(error)
        else:
            answer.set_result(result)
