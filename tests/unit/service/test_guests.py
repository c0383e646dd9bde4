"""Work between two steps: one piece a turn, in order, bounded, and nobody is left waiting."""

from __future__ import annotations

from concurrent.futures import CancelledError

import pytest

from service.faults import EngineFault, QueueFull
from service.guests import Guests


def test_one_piece_runs_at_a_turn_in_the_order_they_came() -> None:
    guests, ran = Guests(), []
    answers = [guests.add(lambda i=i: ran.append(i) or i) for i in range(3)]  # type: ignore[func-returns-value,misc]
    for turn in range(3):
        assert len(guests) == 3 - turn
        assert guests.run_one()
        assert ran == list(range(turn + 1))
    assert [answer.result(0) for answer in answers] == [0, 1, 2]
    assert not guests.run_one()


def test_what_a_piece_raises_is_its_callers_and_the_next_one_runs() -> None:
    guests = Guests()
    broken, whole = guests.add(lambda: 1 // 0), guests.add(lambda: 7)
    while guests.run_one():
        pass
    with pytest.raises(ZeroDivisionError):
        broken.result(0)
    assert whole.result(0) == 7


def test_a_cancelled_piece_is_not_run() -> None:
    guests, ran = Guests(), []
    answer = guests.add(lambda: ran.append(1))
    assert answer.cancel()
    guests.run_one()
    assert not ran
    with pytest.raises(CancelledError):
        answer.result(0)


def test_a_full_queue_refuses_and_takes_more_once_there_is_room() -> None:
    guests = Guests(2)
    guests.add(int)
    guests.add(int)
    with pytest.raises(QueueFull, match="2 calls wait"):
        guests.add(int)
    guests.run_one()
    guests.add(int)


def test_closing_answers_those_that_wait_and_those_that_come() -> None:
    guests, ran = Guests(), []
    waiting = guests.add(lambda: ran.append(1))
    guests.close(EngineFault("ENGINE_STOPPED", "it has stopped"))
    with pytest.raises(EngineFault):
        waiting.result(0)
    with pytest.raises(EngineFault):
        guests.add(int)
    assert not ran
    assert not guests.run_one()
