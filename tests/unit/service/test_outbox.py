"""What is held on its way to the loop, and for how long."""

from __future__ import annotations

import random

import pytest

from engine_c import GREEDY, RowResult
from service.outbox import FEW, HOLD, Outbox
from service.plan import Update
from service.request import Reason, Request


def request(name: str, *, interval: float | None = None, first: float = 0.0, last: float = 1.0) -> Request:
    """A request that has had its first token, and its last at another time."""
    made = Request(name, (1,), GREEDY, interval=interval)
    made.first_token, made.last_token = first, last
    return made


def token(of: Request, *, reason: Reason | None = None) -> Update:
    return Update(of, (RowResult(7, 0.0, 0.0, -1, ()),), reason)


def test_few_requests_are_told_at_once_and_many_after_a_while() -> None:
    outbox, one = Outbox(), request("a")
    outbox.put([token(one)], now=10.0, running=FEW - 1)
    assert len(outbox.take(now=10.0, next_in=0.001)) == 1
    outbox.put([token(one)], now=10.0, running=FEW)
    assert outbox.take(now=10.0, next_in=HOLD / 2) == []
    assert len(outbox.take(now=10.0 + HOLD / 2, next_in=HOLD)) == 1
    assert outbox.take_all() == []


def test_nothing_is_held_longer_than_the_interval_if_steps_are_as_long_as_the_last() -> None:
    outbox, rng, now = Outbox(0.05), random.Random(1), 0.0
    requests = [request(str(i)) for i in range(20)]
    held: dict[str, float] = {}
    for _ in range(300):
        step = rng.uniform(0.001, 0.08)
        for update in outbox.take(now=now, next_in=step):
            held.pop(update.request.id, None)
        now += step
        assert all(now - since <= 0.05 + 1e-9 for since in held.values())
        for one in requests:
            held.setdefault(one.id, now)
        outbox.put([token(one) for one in requests], now=now, running=20)


@pytest.mark.parametrize("urgent", ["first", "last"])
def test_what_begins_or_ends_an_answer_goes_at_once_with_what_was_held_of_it_and_nothing_else(urgent: str) -> None:
    outbox = Outbox(1.0)
    one, other = request("a", last=0.0 if urgent == "first" else 1.0), request("b")
    middle = token(request("a"))
    outbox.put([middle, token(other)], now=0.0, running=20)
    end = token(one, reason=Reason.LENGTH if urgent == "last" else None)
    outbox.put([end], now=0.1, running=20)
    assert outbox.take(now=0.1, next_in=0.1) == [middle, end]
    assert outbox.take(now=0.1, next_in=0.1) == []
    assert [update.request for update in outbox.take(now=0.95, next_in=0.1)] == [other]


def test_a_request_has_its_own_interval_and_takes_the_others_along() -> None:
    outbox = Outbox()
    hasty, patient = request("a", interval=0.0), request("b", interval=0.5)
    outbox.put([token(patient)], now=0.0, running=1)
    assert outbox.take(now=0.0, next_in=0.1) == []
    outbox.put([token(patient), token(hasty)], now=0.1, running=2)
    assert len(outbox.take(now=0.1, next_in=0.1)) == 3


def test_every_update_comes_out_once_and_in_its_requests_order() -> None:
    outbox, rng, now = Outbox(0.03), random.Random(3), 0.0
    sent: dict[str, list[Update]] = {}
    got: dict[str, list[Update]] = {}
    for _ in range(500):
        now += rng.uniform(0, 0.02)
        batch = [
            token(request(str(rng.randrange(9)), interval=rng.choice([None, 0.0, 0.1]), last=rng.choice([0.0, 1.0]))) for _ in range(3)
        ]
        for update in batch:
            sent.setdefault(update.request.id, []).append(update)
        outbox.put(batch, now=now, running=20)
        for update in outbox.take(now=now, next_in=rng.uniform(0, 0.02)):
            got.setdefault(update.request.id, []).append(update)
    for update in outbox.take_all():
        got.setdefault(update.request.id, []).append(update)
    assert got == sent
