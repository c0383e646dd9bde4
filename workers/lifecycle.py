"""The life of one worker slot as a pure state machine: no processes, no clock. Times are seconds of any monotonic clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a worker slot is."""

    DEAD = "dead"  # no process; the start, and the end of one that was drained
    STARTING = "starting"  # a process exists and has not acknowledged yet
    READY = "ready"  # its lanes are attached and compute
    DRAINING = "draining"  # asked to leave
    BACKOFF = "backing off"  # it ended unasked and is to be started again at retry_at
    FAILED = "failed"  # it ended too often and is tried again at retry_at, or in a way that another start can't cure


TRANSITIONS: dict[State, frozenset[State]] = {
    State.DEAD: frozenset({State.STARTING}),
    State.STARTING: frozenset({State.READY, State.DRAINING, State.BACKOFF, State.FAILED}),
    State.READY: frozenset({State.DRAINING, State.BACKOFF, State.FAILED}),
    State.DRAINING: frozenset({State.DEAD}),
    State.BACKOFF: frozenset({State.STARTING, State.DEAD}),
    State.FAILED: frozenset({State.DEAD, State.STARTING}),
}

RUNNING = frozenset({State.STARTING, State.READY, State.DRAINING})
"""States with a process."""


class TransitionError(RuntimeError):
    """A transition the table does not have: a bug of the caller."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to start an ended worker again.

    A worker that computed for stable_s starts afresh: it is restarted at once and its earlier ends are forgotten. After `free_restarts`
    quick ends in a row the next ones wait base_s, twice that, and so on up to cap_s. A row of crash_limit quick ends, or boot_limit without
    ever having been ready, is a failure: what is likely to end again is tried after first_retry_s, twice that, and so on up to each
    retry_s, so that a server heals by itself when the cause has gone, and soon if it was a short one.
    """

    stable_s: float = 1.0
    free_restarts: int = 2
    base_s: float = 0.05
    cap_s: float = 5.0
    crash_limit: int = 10
    boot_limit: int = 3
    first_retry_s: float = 0.5
    retry_s: float = 10.0

    def delay(self, streak: int) -> float:
        """Seconds to wait after the streak-th quick end in a row (1 is the first)."""
        waits = streak - self.free_restarts
        return 0.0 if waits <= 0 else min(self.cap_s, self.base_s * 2.0 ** min(waits - 1, 32))

    def retry(self, failures: int) -> float:
        """Seconds to wait with a worker that has failed after so many failures in a row before this one."""
        return min(self.retry_s, self.first_retry_s * 2.0 ** min(failures, 32))


class Lifecycle:
    """State, counters and deadlines of one slot. An event that the table does not allow raises TransitionError."""

    def __init__(self, policy: RestartPolicy, now: float) -> None:
        self.policy = policy
        self.state = State.DEAD
        self.since = now
        self.retry_at = 0.0
        self.starts = 0
        self.error = ""
        self._streak = 0
        self._boots_failed = 0
        self._failures = 0

    @property
    def restarts(self) -> int:
        """Starts after the first."""
        return max(0, self.starts - 1)

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self.state in RUNNING

    def may_start(self, now: float) -> bool:
        """Whether a wanted worker should be started now."""
        return self.state is State.DEAD or (self.state in (State.BACKOFF, State.FAILED) and now >= self.retry_at)

    def started(self, now: float) -> None:
        """A process was made."""
        self._enter(State.STARTING, now)
        self.starts += 1

    def acknowledged(self, now: float) -> None:
        """All its lanes are attached."""
        self._enter(State.READY, now)
        self._boots_failed = 0
        self.error = ""

    def drain(self, now: float) -> None:
        """It was asked to leave, or told to."""
        self._enter(State.DRAINING, now)

    def ended(self, now: float, cause: str, *, curable: bool) -> None:
        """Its process ended; curable: another start may do better."""
        if self.state is State.DRAINING:
            self._enter(State.DEAD, now)
            return
        booting, uptime = self.state is State.STARTING, now - self.since
        self._boots_failed += booting
        stable = not booting and uptime >= self.policy.stable_s
        self._streak = 1 if stable else self._streak + 1
        self._failures = 0 if stable else self._failures
        retry_at = now + self.policy.retry(self._failures)
        if not curable:
            self._fail(now, cause, retry_at=math.inf)
        elif self._boots_failed >= self.policy.boot_limit:
            self._fail(now, f"{cause}; {self._boots_failed} starts in a row failed", retry_at=retry_at)
        elif self._streak >= self.policy.crash_limit:
            self._fail(now, f"{cause}; {self._streak} quick ends in a row", retry_at=retry_at)
        else:
            self._enter(State.BACKOFF, now)
            self.retry_at = now + self.policy.delay(self._streak)
            self.error = cause

    def drop(self, now: float) -> None:
        """It has no process and is no longer wanted, or is to start afresh with a clean record."""
        self._enter(State.DEAD, now)
        self._streak = self._boots_failed = self._failures = 0

    def _fail(self, now: float, error: str, *, retry_at: float) -> None:
        self._enter(State.FAILED, now)
        self._failures += 1
        self.retry_at = retry_at
        self.error = error

    def _enter(self, state: State, now: float) -> None:
        if state not in TRANSITIONS[self.state]:
            raise TransitionError(f"a worker can't go from {self.state.value} to {state.value}")
        self.state = state
        self.since = now
