"""Looks at a model's counters of experts a few times a second, for the moving windows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from service.load import Counters, Load, Windows
from workers.team import Team

if TYPE_CHECKING:
    from service.load import Shares

Places = tuple[tuple[tuple[int, ...], ...], ...]

LOOK_EVERY = 0.25
"""Seconds between looks."""


class LoadWatch:
    """The windows of one model. `due` and `look` by turns, the rest from any thread."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._steps = -1
        self._windows = Windows()
        info = team.model.info
        self.expert_bytes = info.expert_bytes // max(1, info.layers * info.experts)

    def due(self, steps: int) -> bool:
        """Whether counters may have changed, so many steps being done. If not they need no look: the windows just move on."""
        newest = self._windows.newest
        if newest is None or steps != self._steps:
            self._steps = steps
            return True
        self._windows.add(time.monotonic(), newest)
        return False

    def look(self) -> None:
        """Any thread, as long as the team stays open."""
        counters = self._team.session.telemetry()
        self._windows.add(time.monotonic(), counters)

    def windows(self) -> list[tuple[float, Load]]:
        """The moving windows: their spans, and what they hold. None before the first look."""
        return [(span, load) for span in self._windows.spans if (load := self._windows.load(span)) is not None]

    @property
    def counters(self) -> Counters | None:
        """As they were at the last look."""
        return self._windows.newest

    def places(self) -> Places:
        """[layers][experts]: the nodes that hold the expert, its home first; none for one that is cut over nodes. Empty: that holds for
        all, or there is one node."""
        return self._team.balance().copies if self._team.image.placement.placement == "experts" else ()

    def parts(self) -> Mapping[int | None, Shares | float]:
        """What part of each expert's weights lies on a node [layers, experts], or of every expert; None stands for no node in particular. A
        copy is taken to be read as often as the others."""
        placement, info = self._team.image.placement, self._team.model.info
        if placement.placement == "experts":
            return _parts(self.places(), placement.nodes, (info.layers, info.experts))
        if placement.placement != "none":
            return dict.fromkeys(placement.nodes, 1.0 / len(placement.nodes))
        only = [node.id for node in self._team.topology.nodes if node.memory_bytes]
        return {only[0] if len(only) == 1 else None: 1.0}


def _parts(places: Places, nodes: Sequence[int], shape: tuple[int, int]) -> dict[int | None, Shares]:
    import numpy as np

    parts: dict[int | None, Shares] = {node: np.zeros(shape) for node in nodes}
    for layer, experts in enumerate(places):
        for expert, holders in enumerate(experts):
            for node in holders or nodes:
                parts[node][layer, expert] = 1.0 / len(holders or nodes)
    return parts
