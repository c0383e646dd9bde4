"""Streams over which nothing is asked: when they are ended, and that they are not while they work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from service.node.idle import Seat, Seats


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def test_only_a_stream_that_waits_is_ended_and_once(time: Time) -> None:
    seats, ended = Seats(10.0, clock=time), list[str]()
    seat = seats.take("a:1", lambda: ended.append("a"))
    time.now += 100
    assert seats.end_idle() == 0, "it is being opened"
    requests = seat.take(iter([1, 2]))
    assert next(requests) == 1
    time.now += 100
    assert seats.end_idle() == 0, "it computes"
    assert list(requests) == [2]
    time.now += 100
    assert (seats.end_idle(), ended) == (0, []), "it has come to its end by itself"


def waiting(seats: Seats, ended: queue.SimpleQueue[str]) -> tuple[Seat, queue.SimpleQueue[int | None], threading.Thread, list[int]]:
    """A stream whose thread takes what is put; it has taken one, and waits for the next."""
    asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    seat = seats.take("a:1", lambda: ended.put("told"))
    taken: list[int] = []
    waits = threading.Semaphore(0)

    def requests() -> Iterator[int]:
        waits.release()
        while (number := asked.get()) is not None:
            yield number
            waits.release()

    thread = threading.Thread(target=lambda: taken.extend(seat.take(requests())))
    thread.start()
    asked.put(1)
    assert waits.acquire(timeout=10)
    assert waits.acquire(timeout=10)
    return seat, asked, thread, taken


def test_a_request_that_crosses_the_end_is_not_computed(time: Time) -> None:
    seats, ended = Seats(10.0, clock=time), queue.SimpleQueue[str]()
    seat, asked, thread, taken = waiting(seats, ended)
    time.now += 10
    assert (seats.end_idle(), seats.end_idle(), ended.get_nowait(), ended.empty()) == (1, 0, "told", True)
    asked.put(2)
    thread.join(10)
    assert (taken, seat.ended) == ([1], True)


def test_what_else_comes_over_the_connection_keeps_it(time: Time) -> None:
    seats, ended = Seats(10.0, clock=time), queue.SimpleQueue[str]()
    seat, asked, thread, _ = waiting(seats, ended)
    time.now += 9
    seats.hear("a:1")
    time.now += 9
    assert seats.end_idle() == 0
    seats.hear("a:2")
    time.now += 1
    assert seats.end_idle() == 1
    asked.put(None)
    thread.join(10)
    seats.leave(seat)
    assert seats.end_idle() == 0
