"""News on their way from the engine thread to the loop: how long they may be held so that one wake-up and one message carry several tokens.

Every message costs the server and its client what a good part of a token's computation costs. While few answers run, tokens go out at once;
while many run they are held for a few steps. What begins or ends an answer never waits. Pure: time is passed in, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.plan import Update
from service.request import Request

FEW = 8  # requests of a step from which on tokens are held
HOLD = 0.055  # seconds they are held then at the most, unless the server or the request says otherwise


@dataclass(slots=True)
class _Parcel:
    """What is held for one request."""

    due: float
    updates: list[Update] = field(default_factory=list)


class Outbox:
    """For one engine thread. `interval`: seconds tokens may be held; None: none while few requests run, HOLD while many do."""

    def __init__(self, interval: float | None = None) -> None:
        self._interval = interval
        self._parcels: dict[str, _Parcel] = {}
        self._urgent: dict[str, _Parcel] = {}
        self._due = math.inf  # of those that are not urgent

    def put(self, updates: Sequence[Update], *, now: float, running: int) -> None:
        """Takes what a step of `running` requests brought."""
        general = self._interval if self._interval is not None else 0.0 if running < FEW else HOLD
        for update in updates:
            request = update.request
            parcel = self._parcels.get(request.id)
            if parcel is None:
                due = now + (general if request.interval is None else request.interval)
                parcel = self._parcels[request.id] = _Parcel(due)
                self._due = min(self._due, due)
            parcel.updates.append(update)
            if update.final or _begins(request, update):
                self._urgent[request.id] = parcel

    def take(self, *, now: float, next_in: float = math.inf) -> list[Update]:
        """What must not wait until `next_in` seconds from now, a request's in order. If anything of that kind is there that was held, all
        goes with it: one wake-up is for all."""
        if self._due < now + next_in:
            return self.take_all()
        taken = [update for parcel in self._urgent.values() for update in parcel.updates]
        for request_id in self._urgent:
            del self._parcels[request_id]
        if self._urgent:
            self._urgent = {}
            self._due = min((parcel.due for parcel in self._parcels.values()), default=math.inf)
        return taken

    def take_all(self) -> list[Update]:
        """Everything."""
        taken = [update for parcel in self._parcels.values() for update in parcel.updates]
        self._parcels, self._urgent, self._due = {}, {}, math.inf
        return taken


def _begins(request: Request, update: Update) -> bool:
    """Whether this has the first token of an answer."""
    return bool(update.rows) and not request.score and request.first_token == request.last_token
