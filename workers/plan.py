"""Who computes where: worker processes, their lanes and CPUs; and how much KV memory there is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from engine_c.structs import KV_BLOCK, KV_FORMATS, ModelInfo
from workers.topology import Node, Topology

FrontLane = Literal["auto", "on", "off"]
MAX_LANES = 255

KV_SHARE = 0.25
"""Of the memory that is free, what the KV cache takes at most unless a size is asked for: the weights' pages want to stay cached too."""


@dataclass(frozen=True, slots=True)
class NodeWish:
    """Workers of a node and lanes of each worker; None: planned."""

    workers: int | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker process. cpus[i] is what lanes[i] is pinned to; cpus is empty if the lanes share the node's CPUs unpinned."""

    index: int
    node: int
    lanes: tuple[int, ...]
    cpus: tuple[int, ...]
    node_cpus: tuple[int, ...] = ()
    memory_node: int | None = None
    """Node whose memory the worker prefers: its own, or the nearest that has some; None where there is no choice."""


@dataclass(frozen=True, slots=True)
class TeamPlan:
    """Everybody who computes. max_lanes is the room the session keeps for worker lanes, more than today's so that workers can be added.

    The stepping thread belongs on front_cpus, CPUs of front_node. drained are workers that were planned and sent away: their places stay
    theirs.
    """

    workers: tuple[WorkerSpec, ...]
    front_cpu: int | None
    front_lane: bool
    max_lanes: int
    front_node: int = -1
    front_cpus: tuple[int, ...] = ()
    drained: tuple[WorkerSpec, ...] = ()

    @property
    def lanes(self) -> int:
        """Lanes that compute, the front end's included."""
        return sum(len(worker.lanes) for worker in self.workers) + self.front_lane

    @property
    def places(self) -> tuple[WorkerSpec, ...]:
        """Workers and drained ones, by index."""
        return tuple(sorted((*self.workers, *self.drained), key=lambda spec: spec.index))


class PlanError(ValueError):
    """The wish can't be met on this machine."""


def plan_team(
    topology: Topology,
    *,
    default: NodeWish = NodeWish(),
    nodes: Mapping[int, NodeWish] = MappingProxyType({}),
    drained: Collection[int] = frozenset(),
    front_lane: FrontLane = "auto",
    smt: bool = False,
    previous: TeamPlan | None = None,
) -> TeamPlan:
    """Plans workers on every node that has usable CPUs, by its wish in `nodes` or else the default.

    Planned are one worker a node and one lane a physical core (with smt: a CPU), of which the front end's is one; "auto" gives the front
    end a lane, which is what lets a step end when every worker has died in it. 0 workers or 0 lanes left for them: everything runs in the
    calling process. More lanes than cores are allowed; those of that node are then not pinned to a core each.

    With a previous plan, a worker of it that has a node's wanted number of lanes stays as it is, index, lanes and CPUs; new ones get an
    index and, while there is room, lanes that none of the previous plan has, so that they can start before others leave. `drained` are
    indices of places to leave empty. PlanError if nothing would compute or there are too many lanes.
    """
    places = [node for node in topology.nodes if node.cpus]
    if not places:
        raise PlanError("this process may use no CPU of any node")
    wishes = _wishes(places, default, nodes)
    front = front_lane != "off" if previous is None else previous.front_lane
    cores = _share_cores(topology, places, smt)
    front_cpu = cores[places[0].id][0] if front else None
    cpus = {node.id: tuple(cpu for cpu in cores[node.id] if cpu != front_cpu) for node in places}
    wanted = {node.id: _split(len(cpus[node.id]), wishes[node.id]) for node in places}
    _check_room(sum(map(sum, wanted.values())), previous)
    crew = _Crew(topology, previous)
    missing = {node.id: crew.keep(node, wanted[node.id]) for node in places}
    for node in places:
        crew.hire(node, cpus[node.id], missing[node.id])
    workers = sorted(crew.workers, key=lambda spec: spec.index)
    lanes = sum(len(worker.lanes) for worker in workers)
    crowded = any(not worker.cpus for worker in workers)
    plan = TeamPlan(
        workers=tuple(spec for spec in workers if spec.index not in drained),
        front_cpu=None if crowded or not workers else front_cpu,
        front_lane=front,
        max_lanes=_room(lanes, topology) if previous is None else previous.max_lanes,
        front_node=places[0].id,
        front_cpus=places[0].cpus,
        drained=tuple(spec for spec in workers if spec.index in drained),
    )
    if not plan.lanes:
        raise PlanError("no worker and no front-end lane: nothing would compute")
    return plan


def _wishes(places: Sequence[Node], default: NodeWish, nodes: Mapping[int, NodeWish]) -> dict[int, NodeWish]:
    unknown = sorted(set(nodes) - {node.id for node in places})
    if unknown:
        have = ", ".join(str(node.id) for node in places)
        raise PlanError(f"there is no NUMA node {unknown[0]} with CPUs that may be used; there are {have}")
    wishes = {node.id: nodes.get(node.id, default) for node in places}
    for wish in wishes.values():
        if wish.workers is not None and not 0 <= wish.workers <= MAX_LANES:
            raise PlanError(f"workers per node must be 0 to {MAX_LANES}, not {wish.workers}")
        if wish.threads is not None and not 1 <= wish.threads <= MAX_LANES:
            raise PlanError(f"threads per worker must be 1 to {MAX_LANES}, not {wish.threads}")
    return wishes


def _check_room(lanes: int, previous: TeamPlan | None) -> None:
    room, since = (MAX_LANES, "") if previous is None else (previous.max_lanes, ", fixed at the start")
    if lanes > room:
        raise PlanError(f"{lanes} threads in all workers are asked for, there is room for {room}{since}: ask for fewer workers or threads")


def _room(lanes: int, topology: Topology) -> int:
    """Lanes a session keeps room for."""
    return min(MAX_LANES, max(lanes + 16, 4 * len(topology.cpus_allowed)))


def _share_cores(topology: Topology, nodes: Sequence[Node], smt: bool) -> dict[int, tuple[int, ...]]:
    """First CPUs of each node's cores, no more of them all together than a CPU quota pays for (dealt out in turn, every node has one)."""
    cores = {node.id: topology.core_cpus(node, smt=smt) or node.cpus for node in nodes}
    taken = dict.fromkeys(cores, 1)
    left = topology.lanes_for(smt=smt) - len(cores)
    while left > 0 and any(taken[node] < len(cores[node]) for node in cores):
        for node in cores:
            if left > 0 and taken[node] < len(cores[node]):
                taken[node] += 1
                left -= 1
    return {node: cpus[: taken[node]] for node, cpus in cores.items()}


def _split(cores: int, wish: NodeWish) -> list[int]:
    """Lanes of each worker of a node with so many cores for them."""
    if wish.threads is not None:
        return [wish.threads] * (1 if wish.workers is None else wish.workers)
    count = min(1, cores) if wish.workers is None else wish.workers
    return [max(1, cores // count + (i < cores % count)) for i in range(count)]


class _Crew:
    """The workers planned so far, and the indices and lanes that are still free."""

    def __init__(self, topology: Topology, previous: TeamPlan | None) -> None:
        self.workers: list[WorkerSpec] = []
        self._topology = topology
        self._before = previous.places if previous is not None else ()
        room = MAX_LANES if previous is None else previous.max_lanes
        taken = {lane for spec in self._before for lane in spec.lanes}
        # Lanes of the previous plan come last: whoever has them may have to leave first.
        self._lanes = [lane for lane in range(room) if lane not in taken] + sorted(taken)
        self._indices = iter(i for i in range(2 * MAX_LANES + 1) if i not in {spec.index for spec in self._before})

    def keep(self, node: Node, wanted: list[int]) -> list[int]:
        """Keeps a node's workers of before that have a wanted number of lanes. Returns the lanes of those that are missing."""
        missing = list(wanted)
        for spec in self._before:
            if spec.node == node.id and len(spec.lanes) in missing:
                missing.remove(len(spec.lanes))
                self._add(spec)
        return missing

    def hire(self, node: Node, cpus: tuple[int, ...], missing: Sequence[int]) -> None:
        """Adds workers with so many lanes each to a node."""
        kept = [spec for spec in self.workers if spec.node == node.id]
        free = [cpu for cpu in cpus if all(cpu not in spec.cpus for spec in kept)]
        # With more lanes than cores nobody new is pinned: two pinned to the same would wait for each other.
        crowded = sum(len(spec.lanes) for spec in kept) + sum(missing) > len(cpus)
        memory = self._topology.nearest_memory(node.id) if len(self._topology.memory_nodes) > 1 else None
        for count in missing:
            mine = () if crowded else tuple(free[:count])
            free = free[len(mine) :]
            self._add(WorkerSpec(next(self._indices), node.id, tuple(self._lanes[:count]), mine, node.cpus, memory))

    def _add(self, spec: WorkerSpec) -> None:
        self.workers.append(spec)
        self._lanes = [lane for lane in self._lanes if lane not in spec.lanes]


def kv_block_bytes(info: ModelInfo, kv_format: int) -> int:
    """Bytes of one KV block: keys and values of KV_BLOCK tokens, all layers."""
    element = 4 if kv_format == KV_FORMATS["f32"] else 2
    return info.layers * 2 * info.kv_heads * info.head_dim * KV_BLOCK * element


def plan_kv_blocks(
    info: ModelInfo, *, kv_bytes: int | None, topology: Topology, kv_format: int = KV_FORMATS["bf16"], max_seqs: int = 64
) -> int:
    """KV blocks for a session: what kv_bytes holds, or else what max_seqs sequences of full length need, capped at KV_SHARE of free memory.

    PlanError if that is less than one sequence of a single block, or more than there is.
    """
    block = kv_block_bytes(info, kv_format)
    free = topology.memory_available_bytes
    if kv_bytes is not None:
        if kv_bytes > free > 0:
            raise PlanError(f"KV memory of {_mib(kv_bytes)} is asked for, {_mib(free)} is free: lower --kv-memory")
        blocks = kv_bytes // block
    else:
        blocks = min(max_seqs * -(-info.max_context // KV_BLOCK), int(free * KV_SHARE) // block)
    if blocks < 1:
        room = free if kv_bytes is None else kv_bytes
        remedy = "free memory or raise its limit" if kv_bytes is None else "raise --kv-memory"
        raise PlanError(f"no room for KV memory: one block of {KV_BLOCK} tokens needs {_mib(block)}, {_mib(room)} is there: {remedy}")
    return min(blocks, 2**31 - 1)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 1 << 20 else f"{count} bytes"
