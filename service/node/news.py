"""What a node has to tell its callers, and who waits for it."""

from __future__ import annotations

import threading


class News:
    """Counts changes of a node's description. Any thread."""

    def __init__(self) -> None:
        self.revision = 1
        self.draining = False
        self._changed = threading.Condition()
        self._waiting = 0
        self._leaving = False

    def tell(self, *, draining: bool = False) -> None:
        """The description is another."""
        with self._changed:
            self.draining = self.draining or draining
            self.revision += 1
            self._changed.notify_all()

    def leave(self) -> None:
        """Nobody waits any more, nor from now on."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def wait(self, revision: int, seconds: float, *, room: int) -> None:
        """Returns when the revision is another than this, or after so long; at once if `room` others wait already."""
        with self._changed:
            if self._waiting >= room:
                return
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._leaving or self.revision != revision, seconds)
            finally:
                self._waiting -= 1
