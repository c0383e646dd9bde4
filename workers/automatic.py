"""Rebalances a team by itself: looks at loads at intervals, keeps a moving average, and moves what pays."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from workers.automatic_config import Automatic, Loads
from workers.rebalancing import BalanceReport

log = logging.getLogger("colibri.workers")

LEAST_TOKENS = 1000
"""Choices of experts a layer, on average, before an average is believed."""
KEEP = 0.5
"""Of an average, what is left of it one interval later."""
LONGEST_REST = 64
"""Intervals; after a refusal the next try waits twice as long as before, up to this."""
TIMEOUT_S = 600.0


@dataclass(slots=True)
class LoadAverage:
    """A moving average of what experts had to do, from counts that only grow. Pure."""

    loads: list[list[float]] = field(default_factory=list)
    _last: list[list[float]] = field(default_factory=list)

    def add(self, counts: Loads) -> None:
        """Takes in the counts at the end of an interval. The first only say where counting begins; fewer than before begin anew."""
        now = [[float(count) for count in row] for row in counts]
        if [len(row) for row in now] != [len(row) for row in self._last]:
            self.loads = [[0.0] * len(row) for row in now]
        elif all(b >= a for before, row in zip(self._last, now, strict=True) for a, b in zip(before, row, strict=True)):
            self.loads = [
                [KEEP * load + b - a for load, a, b in zip(loads, before, row, strict=True)]
                for loads, before, row in zip(self.loads, self._last, now, strict=True)
            ]
        self._last = now

    @property
    def known(self) -> bool:
        """Whether it says enough."""
        return bool(self.loads) and sum(map(sum, self.loads)) >= LEAST_TOKENS * len(self.loads)


class Moves(Protocol):
    """Who moves experts (workers.rebalancing.Rebalancer)."""

    @property
    def fixed(self) -> str:
        """Why nothing can ever be moved; "" if it can."""
        ...

    def rebalance(self, load: Loads, *, dry_run: bool, replicas: int | None, min_gain: float, timeout: float) -> BalanceReport:
        """Plans and does it."""
        ...


class Keeper:
    """The thread that rebalances. Where nothing can be moved there is none, which the log says once."""

    def __init__(self, rebalancer: Moves, loads: Callable[[], Loads], config: Automatic) -> None:
        self._rebalancer = rebalancer
        self._loads = config.loads or loads
        self._config = config
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if fixed := rebalancer.fixed:
            log.info("automatic rebalancing has nothing to do: %s", fixed)
            return
        self._thread = threading.Thread(target=self._run, name="colibri-balance", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it. A change that is under way is the rebalancer's to end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        average, rest = LoadAverage(), 1
        while not self._stop.wait(self._config.interval_s * rest):
            try:
                average.add(self._loads())
                rest = min(2 * rest, LONGEST_REST) if average.known and self._refused(average) else 1
            except Exception:  # whatever it is, requests do not depend on it
                log.exception("automatic rebalancing met an error")
                rest = LONGEST_REST

    def _refused(self, average: LoadAverage) -> bool:
        config = self._config
        report = self._rebalancer.rebalance(
            average.loads, dry_run=False, replicas=config.replicas, min_gain=config.min_gain, timeout=TIMEOUT_S
        )
        return bool(report.refused)
