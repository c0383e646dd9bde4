"""Puts a plan of where experts lie into effect while requests run, one expert at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine_c import EngineError, Model, Part
from workers.automatic_config import MIN_GAIN, Loads
from workers.balance import ONE_NUMA_NODE, BalancePlan, ExpertMove, ExpertReplica, plan_balance
from workers.layout import Layout, LayoutError, read_layout
from workers.moving import MoveError, Range, copy, move, range_of, whole_pages
from workers.parts import within
from workers.placement import NODE_RESERVE, PAGE, placement_nodes
from workers.segments import ModelImage
from workers.supervisor import Supervisor
from workers.topology import Topology, read_topology

log = logging.getLogger("colibri.workers")

IDLE_SPEED = 1e-3
"""Of a node without lanes: others do its work, so next to nothing belongs there."""
FOLLOW_S = 5.0
"""How long workers may take to map a copy; who takes longer goes on reading what it did."""
PAUSE_S = 0.001
"""Between the layers of a plan: others want the interpreter too."""


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """Where every expert lies: copies [layers][experts], its home first, with the bytes of each. Experts that lie across all nodes have
    none. fixed says in a sentence why nothing can be moved, "" if it can."""

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


class _Stopped(Exception):
    """The team closes, or time is up."""


class Rebalancer:
    """Where the experts of a team lie, and how they get elsewhere. From any thread; changes follow one another.

    front_node: whose copies the front end itself reads. speeds: lanes of each node, asked each time.
    """

    def __init__(
        self,
        image: ModelImage,
        model: Model,
        supervisor: Supervisor,
        topology: Topology,
        *,
        front_node: int,
        speeds: Callable[[], Mapping[int, float]],
    ) -> None:
        self.degraded: tuple[str, ...] = ()
        self._image, self._model, self._supervisor, self._topology = image, model, supervisor, topology
        self._front_node = front_node
        self._speeds = speeds
        self._layout: Layout | None = None
        self._homes: dict[tuple[int, int], int] = {}
        self._replicas: dict[tuple[int, int], tuple[int, ...]] = {}
        self._turn = threading.Lock()  # held while experts move
        self._closing = threading.Event()

    # ---------------------------------------------------------------- what there is

    def places(self) -> ExpertPlaces:
        """Where every expert lies now."""
        try:
            layers = self._read_layout().layers
        except (LayoutError, OSError) as error:
            return ExpertPlaces((0,), (), (), f"the container's layout can't be read: {error}")
        sizes = tuple(tuple(expert.bytes for expert in layer) for layer in layers)
        placed = self._image.placement
        nodes = placed.nodes or tuple(node.id for node in placement_nodes(self._topology)[:1]) or (0,)
        if placed.placement == "experts":
            copies = tuple(tuple(self._copies(layer, expert) for expert in range(len(own))) for layer, own in enumerate(layers))
            return ExpertPlaces(nodes, copies, sizes)
        everywhere = () if placed.placement == "rows" else nodes
        return ExpertPlaces(nodes, tuple(tuple(everywhere for _ in own) for own in layers), sizes, self._why_fixed())

    @property
    def fixed(self) -> str:
        """Why nothing can be moved, as `places` says it."""
        return self.places().fixed

    def _read_layout(self) -> Layout:
        if self._layout is None:
            self._layout = self._image.layout or read_layout(self._image.fds[0])
        return self._layout

    def _copies(self, layer: int, expert: int) -> tuple[int, ...]:
        layout = self._read_layout()
        if len(layout.layers[layer]) == 1:
            return ()
        return self._home(layer, expert), *self._replicas.get((layer, expert), ())

    def _home(self, layer: int, expert: int) -> int:
        if (layer, expert) not in self._homes:
            self._homes[layer, expert] = self._image.node_at(self._read_layout().layers[layer][expert].gate_up.offset)
        return self._homes[layer, expert]

    def _why_fixed(self) -> str:
        placed = self._image.placement
        if len(placement_nodes(self._topology)) < 2:
            return ONE_NUMA_NODE
        if placed.placement == "rows":
            return "nothing to place: every expert is cut over all NUMA nodes, which is even already (placement rows)"
        if placed.placement == "replicate":
            return "nothing to place: every NUMA node has a copy of everything (placement replicate)"
        return f"nothing to place: {placed.reason}"

    # ---------------------------------------------------------------- changes

    def rebalance(self, load: Loads, *, dry_run: bool, replicas: int | None, min_gain: float = MIN_GAIN, timeout: float) -> BalanceReport:
        """Plans and, unless it is a dry run, does it, in at most about timeout seconds. replicas: None is 0. ValueError: the load does not
        fit the model."""
        began = time.monotonic()
        replicas = replicas or 0
        if replicas < 0:
            raise ValueError(f"{replicas} replicas make no sense: 0 or more")
        if not self._turn.acquire(timeout=timeout):
            raise TimeoutError(f"experts are still being moved after {timeout:g} s: try again")
        try:
            plan = self._plan(load, replicas, min_gain, began + timeout)
            report = BalanceReport(plan, dry_run)
            if not dry_run and not plan.empty:
                report = self._carry_out(plan, began + timeout)
            return replace(report, seconds=time.monotonic() - began)
        finally:
            self._turn.release()

    def close(self) -> None:
        """Makes a change that is under way end soon, and waits for that. Nothing moves afterwards."""
        self._closing.set()
        with self._turn:
            pass

    def _plan(self, load: Loads, replicas: int, min_gain: float, deadline: float) -> BalancePlan:
        places = self.places()
        if places.fixed:
            return _no_plan(places, places.fixed)
        try:
            return self._plan_anew(places, load, replicas, min_gain, deadline)
        except _Stopped as stop:  # of many experts on many nodes it takes seconds, and nobody waits for them who ends the model
            return _no_plan(places, f"nothing was planned: {stop}")

    def _plan_anew(self, places: ExpertPlaces, load: Loads, replicas: int, min_gain: float, deadline: float) -> BalancePlan:
        def pause() -> None:
            self._go_on(deadline)
            time.sleep(PAUSE_S)

        lanes = self._speeds()
        return plan_balance(
            load,
            places.expert_bytes,
            places.nodes,
            places.copies,
            replicas=replicas,
            min_gain=min_gain,
            speeds={node: lanes.get(node, 0.0) or IDLE_SPEED for node in places.nodes},
            capacity=_capacity(places),
            pause=pause,
        )

    def _carry_out(self, plan: BalancePlan, deadline: float) -> BalanceReport:
        moved: list[ExpertMove] = []
        replicated: list[ExpertReplica] = []
        dropped: list[ExpertReplica] = []
        refused = ""
        try:
            for replica in plan.dropped:
                self._go_on(deadline)
                self._drop(replica)
                dropped.append(replica)
            for step in plan.moves:
                self._go_on(deadline)
                self._move(step)
                moved.append(step)
            for replica in plan.replicas:
                self._go_on(deadline)
                self._replicate(replica)
                replicated.append(replica)
        except _Stopped as stop:
            refused = str(stop)
        except (MoveError, OSError, EngineError) as refusal:
            refused = str(refusal)
            self._refuse(f"experts stay where they are: {refusal}")
        log.info("rebalanced: %s", f"{len(moved)} moved, {len(replicated)} copied, {len(dropped)} copies ended; {refused or plan.reason}")
        return BalanceReport(plan, False, tuple(moved), tuple(replicated), tuple(dropped), refused)

    def _go_on(self, deadline: float) -> None:
        if self._closing.is_set():
            raise _Stopped("the model is being closed")
        if time.monotonic() >= deadline:
            raise _Stopped("time was up: what is left can be done by asking again")

    def _refuse(self, text: str) -> None:
        if text and text not in self.degraded:
            self.degraded = (*self.degraded, text)
            log.warning("%s", text)

    # ---------------------------------------------------------------- one expert

    def _move(self, step: ExpertMove) -> None:
        wanted = whole_pages(self._range(step.layer, step.expert), self._image.filled)
        move(within(self._image.base_parts(None), wanted.offset, wanted.bytes), step.source, step.target, rest=self._closing.wait)
        self._homes[step.layer, step.expert] = step.target
        self._tell_engine(step.layer, step.expert)

    def _replicate(self, replica: ExpertReplica) -> None:
        wanted = self._range(replica.layer, replica.expert)
        (source,) = within(self._image.base_parts(None), wanted.offset, wanted.bytes)
        cpus = next((node.cpus for node in self._topology.nodes if node.id == replica.node), ())
        part, refused = copy(source, self._image.bytes, replica.node, cpus, rest=self._closing.wait)
        if refused:
            self._refuse(f"copies of experts: {refused}")

        def add() -> Sequence[Part]:
            self._image.add_replica(replica.node, part)
            return [part]

        self._remap(replica.node, add)
        key = replica.layer, replica.expert
        self._replicas[key] = (*self._replicas.get(key, ()), replica.node)
        self._tell_engine(*key)

    def _drop(self, replica: ExpertReplica) -> None:
        key = replica.layer, replica.expert
        self._replicas[key] = tuple(node for node in self._replicas[key] if node != replica.node)
        self._tell_engine(*key)
        wanted = self._range(*key)

        def end() -> Sequence[Part]:
            self._image.end_replica(replica.node, wanted.offset)
            return within(self._image.base_parts(replica.node), wanted.offset, wanted.bytes)

        self._remap(replica.node, end)

    def _remap(self, node: int, change: Callable[[], Sequence[Part]]) -> None:
        parts: list[Part] = []

        def changed() -> Sequence[Part]:
            parts.extend(change())
            return parts

        self._supervisor.remap(node, changed, FOLLOW_S)
        if node == self._front_node:
            for part in parts:
                self._model.remap(part)

    def _tell_engine(self, layer: int, expert: int) -> None:
        self._model.place(layer, expert, self._copies(layer, expert))

    def _range(self, layer: int, expert: int) -> Range:
        own = range_of(self._read_layout().layers[layer][expert], self._image.bytes)
        if not own.bytes:
            raise MoveError(f"layer {layer}, expert {expert}: it has no page of {PAGE} bytes of its own")
        return own


def _no_plan(places: ExpertPlaces, reason: str) -> BalancePlan:
    before = plan_balance([()] * len(places.copies), 0, places.nodes[:1], [()] * len(places.copies))
    return replace(before, nodes=places.nodes, copies=places.copies, reason=reason)


def _capacity(places: ExpertPlaces) -> dict[int, int]:
    """Bytes of experts that each node may hold: what it does and what is free there."""
    held = dict.fromkeys(places.nodes, 0)
    for sizes, copies in zip(places.expert_bytes, places.copies, strict=True):
        for size, at in zip(sizes, copies, strict=True):
            for node in at:
                held[node] += size
    free = {node.id: node.free_bytes for node in read_topology().nodes}
    return {node: bytes_held + max(0, left - NODE_RESERVE) for node, bytes_held in held.items() if (left := free.get(node)) is not None}
