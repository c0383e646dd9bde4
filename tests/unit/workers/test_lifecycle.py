"""A worker slot's life, event by event."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from workers.lifecycle import TRANSITIONS, Lifecycle, RestartPolicy, State, TransitionError

POLICY = RestartPolicy(stable_s=1.0, free_restarts=2, base_s=0.1, cap_s=1.0, crash_limit=5, boot_limit=3, first_retry_s=2.0, retry_s=20.0)


def ready(now: float = 0.0) -> Lifecycle:
    life = Lifecycle(POLICY, now)
    life.started(now)
    life.acknowledged(now)
    return life


def test_a_worker_that_ends_unasked_is_started_again_at_once() -> None:
    life = ready()
    life.ended(10.0, "killed by SIGKILL", curable=True)
    assert life.state is State.BACKOFF
    assert life.may_start(10.0)
    assert life.error == "killed by SIGKILL"
    life.started(10.0)
    life.acknowledged(10.1)
    assert (life.restarts, life.error) == (1, "")


def test_quick_ends_wait_longer_and_longer_and_then_fail() -> None:
    life = ready()
    waits = []
    now = 0.0
    while life.state is State.READY:
        now += 0.5
        life.ended(now, "killed by SIGSEGV", curable=True)
        if life.state is State.BACKOFF:
            waits.append(life.retry_at - now)
            now = life.retry_at
            assert not life.may_start(now - 1e-3) or waits[-1] == 0
            life.started(now)
            life.acknowledged(now)
    assert waits == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert life.state is State.FAILED
    assert life.error == "killed by SIGSEGV; 5 quick ends in a row"
    assert life.retry_at == now + POLICY.first_retry_s


def test_computing_for_a_while_clears_the_record() -> None:
    life = ready()
    for now in range(100):
        life.ended(2.0 * now + 1.0, "killed by SIGKILL", curable=True)
        assert life.may_start(2.0 * now + 1.0)
        life.started(2.0 * now + 1.0)
        life.acknowledged(2.0 * now + 1.0)
    assert life.restarts == 100


def test_starts_that_never_succeed_fail_after_the_limit() -> None:
    life = Lifecycle(POLICY, 0.0)
    for now in itertools.count():
        life.started(now)
        life.ended(now, "exited with code 1", curable=True)
        if life.state is State.FAILED:
            break
    assert life.starts == POLICY.boot_limit
    assert life.error == "exited with code 1; 3 starts in a row failed"


def test_what_another_start_cannot_cure_fails_at_once() -> None:
    life = Lifecycle(POLICY, 0.0)
    life.started(0.0)
    life.ended(0.1, "exited with code 3", curable=False)
    assert life.state is State.FAILED
    assert not life.may_start(1e9)


def test_a_failed_worker_is_tried_more_and_more_seldom_and_has_a_clean_record_when_it_stays() -> None:
    life = Lifecycle(POLICY, 0.0)
    for _ in range(POLICY.boot_limit):
        life.started(0.0)
        life.ended(0.0, "killed by SIGKILL", curable=True)
    waits = []
    for _ in range(6):
        now = life.retry_at
        waits.append(now - life.since)
        assert not life.may_start(now - 1e-3)
        assert life.may_start(now)
        life.started(now)
        life.ended(now, "killed by SIGKILL", curable=True)
        assert life.state is State.FAILED
    assert waits == [2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    life.started(life.retry_at)
    life.acknowledged(life.since)
    life.ended(life.since + POLICY.stable_s, "killed by SIGKILL", curable=True)
    assert life.may_start(life.since)
    for _ in range(POLICY.boot_limit):
        life.started(life.since)
        life.ended(life.since, "killed by SIGKILL", curable=True)
    assert life.retry_at - life.since == POLICY.first_retry_s


def test_a_failed_worker_that_is_given_another_chance_starts_with_a_clean_record() -> None:
    life = Lifecycle(POLICY, 0.0)
    life.started(0.0)
    life.ended(0.1, "exited with code 3", curable=False)
    life.drop(1.0)
    assert life.may_start(1.0)
    for _ in range(POLICY.boot_limit - 1):
        life.started(1.0)
        life.ended(1.0, "exited with code 1", curable=True)
    assert life.state is State.BACKOFF


def test_a_drained_worker_stays_dead_however_it_ends() -> None:
    life = ready()
    life.drain(1.0)
    assert life.running
    life.ended(2.0, "killed by SIGKILL", curable=True)
    assert (life.state, life.running) == (State.DEAD, False)


def test_the_delay_is_bounded_for_any_row_of_ends() -> None:
    assert [POLICY.delay(n) for n in (1, 2, 3, 4, 10_000)] == pytest.approx([0, 0, 0.1, 0.2, 1.0])


EVENTS: dict[str, Callable[[Lifecycle, float], None]] = {
    "started": Lifecycle.started,
    "acknowledged": Lifecycle.acknowledged,
    "drain": Lifecycle.drain,
    "drop": Lifecycle.drop,
    "ended": lambda life, now: life.ended(now, "killed by SIGKILL", curable=True),
    "mismatch": lambda life, now: life.ended(now, "exited with code 3", curable=False),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.floats(0, 3))))
def test_any_row_of_events_follows_the_table_or_is_refused(events: list[tuple[str, float]]) -> None:
    life = Lifecycle(POLICY, 0.0)
    now = 0.0
    for name, pause in events:
        now += pause
        before = life.state
        try:
            EVENTS[name](life, now)
        except TransitionError:
            assert life.state is before
        else:
            assert life.state in TRANSITIONS[before]
            assert life.since == now
        assert not (life.running and life.may_start(now))
