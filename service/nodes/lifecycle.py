"""A node's life as a front end sees it. Pure; time is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a node stands."""

    CONNECTING = "connecting"  # being reached, asked what it is, and opened
    READY = "ready"  # computes for us
    DRAINING = "draining"  # finishes what it has and leaves
    LOST = "lost"  # was not reached, or no longer answers; is tried again
    REFUSED = "refused"  # is there and must not be used: another model, version or certificate; is looked at again
    GONE = "gone"  # its name no longer means it


TRANSITIONS: dict[State, frozenset[State]] = {
    State.CONNECTING: frozenset({State.READY, State.LOST, State.REFUSED, State.GONE}),
    State.READY: frozenset({State.DRAINING, State.LOST, State.GONE}),
    State.DRAINING: frozenset({State.LOST, State.GONE}),
    State.LOST: frozenset({State.CONNECTING, State.GONE}),
    State.REFUSED: frozenset({State.CONNECTING, State.GONE}),
    State.GONE: frozenset(),
}
FIRST_PAUSE = 0.1
"""Seconds before a lost node is tried again; twice as long after each failure,"""
LONGEST_PAUSE = 1.0
"""up to this: a node that is back serves within seconds."""
REFUSED_PAUSE = 1.0
"""Seconds before a refused one is looked at again."""


class IllegalTransition(RuntimeError):
    """A bug of ours."""


@dataclass(slots=True)
class Life:
    """One node's."""

    since: float  # it first was as it is `shown`
    state: State = State.CONNECTING
    reason: str = ""  # of REFUSED and LOST, a sentence
    losses: int = 0  # times it was lost while it was ready
    left: bool = False  # it was lost as it had said it would be
    _last: State = State.CONNECTING  # what came of it before it was tried again
    _pause: float = FIRST_PAUSE

    def move(self, target: State, now: float, reason: str = "") -> bool:
        """Changes state; False if nobody need be told: it is lost still, in whatever words, or refused for the same reason as before."""
        if target not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.state.value} -> {target.value}")
        if target is State.CONNECTING:
            self._last, self.state = self.state, target
            return False
        if target is State.LOST and self.state in (State.READY, State.DRAINING):
            self.losses += self.state is State.READY
            self._pause = FIRST_PAUSE
        self.left = target is State.LOST and (self.left or self.state is State.DRAINING)
        other = target is not self.shown
        news = other or (target is not State.LOST and reason != self.reason)
        self._last, self.state, self.since, self.reason = target, target, now if other else self.since, reason
        return news

    @property
    def shown(self) -> State:
        """As people see it: one that is tried again is still what it was, until something else comes of it."""
        return self._last if self.state is State.CONNECTING else self.state

    def pause(self) -> float:
        """Seconds until it is tried again."""
        if self.state is State.REFUSED:
            return REFUSED_PAUSE
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause
