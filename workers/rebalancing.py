"""Puts a plan of where experts lie into effect while requests run, one expert at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.balance import MIN_GAIN, ONE_NODE, BalancePlan, ExpertMove, ExpertReplica, plan_balance
from workers.layout import Layout, LayoutError, read_layout
from workers.segments import ModelImage

NO_LAYOUT = "the container's layout can't be read"


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """Where every expert lies: copies [layers][experts], its home first, with the bytes of each. Experts that lie across all nodes have none.
    fixed says in a sentence why nothing can be moved, "" if it can."""

    nodes: tuple[int, ...]
    copies: tuple[tuple[tuple[int, ...], ...], ...]
    expert_bytes: tuple[tuple[int, ...], ...]
    fixed: str = ""


@dataclass(frozen=True, slots=True)
class BalanceReport:
    """What was planned and what came of it. A dry run does nothing. refused: what the machine did not allow, "" if nothing: the rest of
    the plan was then left."""

    plan: BalancePlan
    dry_run: bool
    moved: tuple[ExpertMove, ...] = ()
    replicated: tuple[ExpertReplica, ...] = ()
    dropped: tuple[ExpertReplica, ...] = ()
    refused: str = ""
    seconds: float = 0.0


def expert_places(image: ModelImage, layout: Layout | None) -> ExpertPlaces:
    """Where an image has its experts."""
    nodes = image.placement.nodes or (0,)
    layers = layout.layers if layout is not None else ()
    sizes = tuple(tuple(expert.bytes for expert in layer) for layer in layers)
    if image.placement.placement != "experts":
        everywhere = nodes if image.placement.placement == "replicate" or len(nodes) == 1 else ()
        return ExpertPlaces(nodes, tuple(tuple(everywhere for _ in layer) for layer in layers), sizes, _why_fixed(image))
    copies = tuple(
        tuple((image.node_at(expert.gate_up.offset),) if len(layer) > 1 else () for expert in layer) for layer in layers
    )
    return ExpertPlaces(nodes, copies, sizes)


def _why_fixed(image: ModelImage) -> str:
    if len(image.placement.nodes) < 2:
        return ONE_NODE if image.placement.nodes else f"nothing to place: {image.placement.reason}"
    if image.placement.placement == "rows":
        return "nothing to place: every expert is cut over all nodes, which is even already (placement rows)"
    return "nothing to place: every node has a copy of everything (placement replicate)"


class Rebalancer:
    """Plans and changes where experts lie. Its methods may be called from any thread; changes follow one another."""

    def __init__(self, image: ModelImage, loads: Callable[[], Sequence[Sequence[float]]], speeds: Callable[[], dict[int, float]]) -> None:
        self._image = image
        self._loads = loads
        self._speeds = speeds
        self._layout: Layout | None = None
        self._lock = threading.Lock()

    def places(self) -> ExpertPlaces:
        """Where every expert lies now."""
        if self._layout is None:
            try:
                self._layout = self._image.layout or read_layout(self._image.fds[0])
            except (LayoutError, OSError):
                return ExpertPlaces((0,), (), (), NO_LAYOUT)
        return expert_places(self._image, self._layout)

    def plan(self, load: Sequence[Sequence[float]] | None, *, replicas: int, min_gain: float = MIN_GAIN) -> BalancePlan:
        """What would be done. ValueError if the load does not fit the model."""
        places = self.places()
        if places.fixed:
            return plan_nothing(places)
        load = self._loads() if load is None else load
        speeds = {node: self._speeds().get(node, 0.0) or IDLE_SPEED for node in places.nodes}
        return plan_balance(load, places.expert_bytes, places.nodes, places.copies, replicas=replicas, min_gain=min_gain, speeds=speeds)

    def rebalance(
        self, load: Sequence[Sequence[float]] | None, *, dry_run: bool, replicas: int, min_gain: float, timeout: float
    ) -> BalanceReport:
        """Plans and, unless it is a dry run, does it."""
        begin = time.monotonic()
        with self._lock:
            plan = self.plan(load, replicas=replicas, min_gain=min_gain)
            return BalanceReport(plan, dry_run, seconds=time.monotonic() - begin)


IDLE_SPEED = 1e-3
"""Of a node without lanes: others do its work, so next to nothing belongs there."""


def plan_nothing(places: ExpertPlaces) -> BalancePlan:
    """The plan where nothing can be moved."""
    plan = plan_balance([()] * len(places.copies), 0, places.nodes[:1], [()] * len(places.copies))
    return BalancePlan(places.nodes, (), (), (), places.copies, plan.before, plan.after, 0, 0.0, places.fixed)
