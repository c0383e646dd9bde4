"""Streams over which nothing is asked: each has a place that others may need, and perhaps KV blocks. Times are of one clock, in seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

_Request = TypeVar("_Request")


@dataclass(slots=True, eq=False)
class Seat:
    """An open stream's, which is idle while its thread waits for the next request.

    Invariant: once `ended`, for good, the stream's thread sends nothing more; while busy, it is never ended.
    """

    peer: str  # the connection that it goes over
    end: Callable[[], None]  # has the caller told; from another thread than the stream's
    clock: Callable[[], float] = time.monotonic
    busy: bool = True
    ended: bool = False
    heard: float = 0.0  # of its caller, last
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, requests: Iterator[_Request]) -> Iterator[_Request]:
        """The requests as they come, until there are no more or it is ended. For the stream's own thread."""
        self._turn(busy=False)
        for request in requests:
            if not self._turn(busy=True):
                return
            yield request
            self._turn(busy=False)
        self._turn(busy=True)

    def hear(self) -> None:
        """Its caller is there, though it asks for nothing."""
        self.heard = self.clock()

    def end_if_idle(self, limit: float) -> bool:
        """Ends it if its caller has not been heard of for that long; whether it did."""
        with self._lock:
            if self.busy or self.ended or self.clock() - self.heard < limit:
                return False
            self.ended = True
        self.end()
        return True

    def _turn(self, *, busy: bool) -> bool:
        with self._lock:
            self.busy, self.heard = busy, self.clock()
            return not self.ended


class Seats:
    """All open streams. Any thread."""

    def __init__(self, limit: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._seats: dict[Seat, None] = {}

    def take(self, peer: str, end: Callable[[], None]) -> Seat:
        """For a stream that is being opened, which is busy until it waits for its first request."""
        seat = Seat(peer, end, self._clock)
        with self._lock:
            self._seats[seat] = None
        return seat

    def leave(self, seat: Seat) -> None:
        """It is over."""
        with self._lock:
            self._seats.pop(seat, None)

    def hear(self, peer: str) -> None:
        """Something else came over a connection: whoever has streams there is alive."""
        for seat in self._all():
            if seat.peer == peer:
                seat.hear()

    def end_idle(self) -> int:
        """Ends those that have been idle too long; how many."""
        return sum([seat.end_if_idle(self.limit) for seat in self._all()])

    def _all(self) -> list[Seat]:
        with self._lock:
            return list(self._seats)
