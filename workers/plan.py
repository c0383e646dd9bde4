"""Who computes where: worker processes, their lanes and CPUs; and how much KV memory there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine_c.structs import KV_BLOCK, KV_FORMATS, ModelInfo
from workers.topology import Node, Topology

FrontLane = Literal["auto", "on", "off"]
MAX_LANES = 255

KV_SHARE = 0.25
"""Of the memory that is free, what the KV cache takes at most unless a size is asked for: the weights' pages want to stay cached too."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker process. cpus[i] is what lanes[i] is pinned to; cpus is empty if the lanes share the node's CPUs unpinned."""

    index: int
    node: int
    lanes: tuple[int, ...]
    cpus: tuple[int, ...]
    node_cpus: tuple[int, ...] = ()
    memory_node: int | None = None
    """Node whose memory the worker prefers; None where there is no choice."""


@dataclass(frozen=True, slots=True)
class TeamPlan:
    """Everybody who computes. max_lanes is the room the session keeps for worker lanes, more than today's so that workers can be added."""

    workers: tuple[WorkerSpec, ...]
    front_cpu: int | None
    front_lane: bool
    max_lanes: int

    @property
    def lanes(self) -> int:
        """Lanes that compute, the front end's included."""
        return sum(len(worker.lanes) for worker in self.workers) + self.front_lane


class PlanError(ValueError):
    """The wish can't be met on this machine."""


def plan_team(
    topology: Topology, *, workers_per_node: int | None = None, threads_per_worker: int | None = None, front_lane: FrontLane = "auto"
) -> TeamPlan:
    """Plans workers on every node that has usable CPUs.

    By default one worker a node and one lane a physical core, of which the front end's is one; "auto" gives the front end a lane, which is
    what lets a step end when every worker has died in it. 0 workers or 0 lanes left for them: everything runs in the calling process. More
    lanes than cores are allowed; those of that node are then not pinned to a core each. PlanError if nothing would compute or there are too
    many lanes.
    """
    _check_wish(workers_per_node, threads_per_worker)
    nodes = [node for node in topology.nodes if node.cpus]
    if not nodes:
        raise PlanError("this process may use no CPU of any node")
    front = front_lane != "off" or workers_per_node == 0
    if front_lane == "off" and workers_per_node == 0:
        raise PlanError("no worker and no front-end lane: nothing would compute")
    cores = _share_cores(topology, nodes)
    front_cpu = cores[nodes[0].id][0] if front else None
    workers: list[WorkerSpec] = []
    for node in nodes:
        cpus = tuple(cpu for cpu in cores[node.id] if cpu != front_cpu)
        for lanes in _split(len(cpus), workers_per_node, threads_per_worker):
            workers.append(_worker(topology, node, cpus, lanes, workers))
        _unpin_if_crowded(workers, node, cpus)
    lanes = sum(len(worker.lanes) for worker in workers)
    if lanes > MAX_LANES:
        raise PlanError(f"{lanes} worker lanes are planned, {MAX_LANES} are possible: lower --workers-per-node or --threads-per-worker")
    crowded = any(not worker.cpus for worker in workers)
    room = min(MAX_LANES, max(lanes, 2 * len(topology.cpus_allowed)))
    return TeamPlan(tuple(workers), None if crowded or not workers else front_cpu, front or not workers, room)


def _check_wish(workers_per_node: int | None, threads_per_worker: int | None) -> None:
    if workers_per_node is not None and not 0 <= workers_per_node <= MAX_LANES:
        raise PlanError(f"workers per node must be 0 to {MAX_LANES}, not {workers_per_node}")
    if threads_per_worker is not None and not 1 <= threads_per_worker <= MAX_LANES:
        raise PlanError(f"threads per worker must be 1 to {MAX_LANES}, not {threads_per_worker}")


def _share_cores(topology: Topology, nodes: list[Node]) -> dict[int, tuple[int, ...]]:
    """First CPUs of each node's cores, no more of them all together than a CPU quota pays for (dealt out in turn, every node has one)."""
    cores = {node.id: topology.core_cpus(node) or node.cpus for node in nodes}
    taken = dict.fromkeys(cores, 1)
    left = topology.usable_lanes - len(cores)
    while left > 0 and any(taken[node] < len(cores[node]) for node in cores):
        for node in cores:
            if left > 0 and taken[node] < len(cores[node]):
                taken[node] += 1
                left -= 1
    return {node: cpus[: taken[node]] for node, cpus in cores.items()}


def _split(cores: int, workers: int | None, threads: int | None) -> list[int]:
    """Lanes of each worker of a node with so many cores for them."""
    if threads is not None:
        return [threads] * (1 if workers is None else workers)
    count = min(1, cores) if workers is None else workers
    return [max(1, cores // count + (i < cores % count)) for i in range(count)]


def _worker(topology: Topology, node: Node, cpus: tuple[int, ...], lanes: int, before: list[WorkerSpec]) -> WorkerSpec:
    """The next worker: lanes numbered on, CPUs of its node in turn."""
    first = sum(len(worker.lanes) for worker in before)
    used = sum(len(worker.lanes) for worker in before if worker.node == node.id)
    many_nodes = sum(other.memory_bytes > 0 for other in topology.nodes) > 1
    return WorkerSpec(
        index=len(before),
        node=node.id,
        lanes=tuple(range(first, first + lanes)),
        cpus=cpus[used : used + lanes],
        node_cpus=node.cpus,
        memory_node=node.id if many_nodes and node.memory_bytes > 0 else None,
    )


def _unpin_if_crowded(workers: list[WorkerSpec], node: Node, cpus: tuple[int, ...]) -> None:
    """If a node has more lanes than cores, none of them is pinned to one: two pinned to the same would wait for each other."""
    if sum(len(worker.lanes) for worker in workers if worker.node == node.id) <= len(cpus):
        return
    for i, worker in enumerate(workers):
        if worker.node == node.id:
            workers[i] = WorkerSpec(worker.index, worker.node, worker.lanes, (), worker.node_cpus, worker.memory_node)


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
