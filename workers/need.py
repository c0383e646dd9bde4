"""What a model would take of memory, found out before anything is made for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from engine_c import Model, session_bytes
from workers.placement import placement_nodes
from workers.plan import NodeWish, PlanError, plan_kv_blocks, plan_team
from workers.segments import RESERVE, SegmentError
from workers.team import TeamConfig
from workers.topology import read_topology

WORKER_BYTES = 25 << 20
"""Of a worker process, beside what it shares."""


class NoRoom(PlanError):
    """Not even the least of KV memory fits."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes: of the weights (copied, or kept in the page cache), the session with its KV memory, the workers; and what is free for them."""

    weights: int
    session: int
    workers: int
    available: int

    @property
    def total(self) -> int:
        """All of it, with what must stay free beside."""
        return self.weights + self.session + self.workers + RESERVE

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.total <= self.available

    @property
    def sentence(self) -> str:
        """The sum, in words."""
        parts = {"weights": self.weights, "KV memory and activations": self.session, "workers": self.workers, "reserve": RESERVE}
        return f"{self.total >> 20} MiB (" + ", ".join(f"{size >> 20} of {what}" for what, size in parts.items()) + ")"


def memory_need(path: str | os.PathLike[str], config: TeamConfig, *, in_use: int = 0) -> MemoryNeed:
    """What Team.open would take. Reads the file's header and nothing else.

    in_use: bytes of files that are mapped by others and count as free, as the page cache does, but should stay there. PlanError if the
    workers cannot be had on this machine at all, NoRoom if the KV memory cannot; EngineError if the file is no model; SegmentError if it
    cannot be read.
    """
    topology = read_topology()
    topology = replace(topology, memory_available_bytes=max(0, topology.memory_available_bytes - in_use))
    wished = NodeWish(config.workers_per_node, config.threads_per_worker)
    plan = plan_team(topology, default=wished, front_lane=config.front_lane, smt=config.smt)
    copies = max(1, len(placement_nodes(topology))) if config.placement == "replicate" else 1
    try:
        weights = os.stat(path).st_size * copies
    except OSError as refusal:
        raise SegmentError(f"{path}: {refusal.strerror}") from refusal
    wish = replace(config.session, max_lanes=plan.max_lanes, front_lane=int(plan.front_lane))
    with Model.open(path) as model:
        if not wish.kv_blocks:
            # What is asked for is held against what is free at the end, in one sum with all the rest.
            left = max(topology.memory_available_bytes - weights, config.kv_bytes or 0)
            after = replace(topology, memory_available_bytes=left)
            try:
                blocks = plan_kv_blocks(
                    model.info, kv_bytes=config.kv_bytes, topology=after, kv_format=wish.kv_format, max_seqs=wish.max_seqs
                )
            except PlanError as refusal:
                raise NoRoom(str(refusal)) from refusal
            wish = replace(wish, kv_blocks=blocks)
        session = session_bytes(model, wish)
    return MemoryNeed(weights, session, len(plan.workers) * WORKER_BYTES, topology.memory_available_bytes)
