"""Finds stop strings in text that arrives in pieces. Pure.

Text that could be the beginning of a stop string is held back until it is known not to be one, so nothing that belongs to a stop string is
ever given out, however the pieces are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """`text` may be given out; `stop` is the string that matched, or None."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Stops at the match that is complete first; of several complete at the same character, at the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._longest = len(self._stops[0]) if self._stops else 0
        self._held = ""

    def feed(self, text: str) -> Match:
        """Takes some more text. After a match nothing may be fed."""
        if not self._stops:
            return Match(text)
        buffer = self._held + text
        found = self._find(buffer)
        if found is not None:
            at, stop = found
            self._held = ""
            return Match(buffer[:at], stop)
        keep = self._prefix_length(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Match(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[int, str] | None:
        """Where the match begins that ends first; the longest of those that end there."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = buffer.find(stop)
            if at >= 0 and (best is None or at + len(stop) < best[0] + len(best[1])):
                best = at, stop
        return best

    def _prefix_length(self, buffer: str) -> int:
        """Characters at the end that begin some stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[len(buffer) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
