"""Who has which slot: a place in the engine where a running sequence's routing state is kept (colibri_seq.slot). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from service.blocks import IntegrityError

NONE = -1


class Slots:
    """All slots of a session; with none at all, nobody gets one."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # the one given back last is taken first: its state is in the cache

    def take(self) -> int:
        """One that nobody has; NONE if the session has none at all. IndexError if all are taken: a bug of ours."""
        return self._free.pop() if self.total else NONE

    def give(self, slot: int) -> None:
        """Takes one back; NONE does nothing."""
        if slot != NONE:
            self._free.append(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises IntegrityError unless the free ones and `held`, those of everyone who has one, are all there are, each once."""
        if sorted([*self._free, *held]) != list(range(self.total)):
            raise IntegrityError("a routing slot is lost, or has two holders")
