"""What the operators' messages are made of: workers, models and the machine, as protobuf."""

from __future__ import annotations

import time
from collections.abc import Iterable

from colibri.v1 import operator_pb2 as pb
from service.hosted import Hosted, ModelState
from service.load_messages import write_places
from workers.lifecycle import State
from workers.slot import WorkerSnapshot
from workers.team import TeamDescription
from workers.topology import Topology

MODEL_STATES = {
    ModelState.LOADING: pb.MODEL_STATE_LOADING,
    ModelState.READY: pb.MODEL_STATE_READY,
    ModelState.SERVING: pb.MODEL_STATE_SERVING,
    ModelState.DRAINING: pb.MODEL_STATE_DRAINING,
}
WORKER_STATES = {
    State.DEAD: pb.WORKER_STATE_DEAD,
    State.STARTING: pb.WORKER_STATE_STARTING,
    State.READY: pb.WORKER_STATE_READY,
    State.DRAINING: pb.WORKER_STATE_DRAINING,
    State.BACKOFF: pb.WORKER_STATE_BACKING_OFF,
    State.FAILED: pb.WORKER_STATE_FAILED,
}


def worker_messages(model: str, team: TeamDescription) -> list[pb.Worker]:
    """All workers of a team as they were seen."""
    lanes = {lane.lane: lane for lane in team.lanes}
    messages = []
    for worker in team.workers.workers:
        theirs = [lanes[lane] for lane in worker.lanes if lane in lanes]
        message = _worker_message(model, worker)
        message.tasks_homed = sum(lane.homed for lane in theirs)
        message.tasks_local = sum(lane.local for lane in theirs)
        messages.append(message)
    return messages


def _worker_message(model: str, worker: WorkerSnapshot) -> pb.Worker:
    return pb.Worker(
        index=worker.index,
        model=model,
        node=worker.node,
        state=WORKER_STATES[worker.state],
        pid=worker.pid,
        lanes=worker.lanes,
        cpus=worker.cpus,
        tasks=worker.tasks,
        restarts=worker.restarts,
        in_state_seconds=worker.in_state_s,
        last_end=worker.last_end,
        error=worker.error,
        degraded=worker.degraded,
    )


def workers_of(hosted: Hosted) -> list[pb.Worker]:
    """All workers of a model. Any thread."""
    return worker_messages(hosted.name, hosted.team.describe())


def model_message(hosted: Hosted) -> pb.LoadedModel:
    """A loaded model. Any thread."""
    workers = hosted.team.supervisor.snapshot()
    return pb.LoadedModel(
        name=hosted.name,
        path=str(hosted.path),
        state=MODEL_STATES[hosted.state],
        quantisation=hosted.model.artifact.quantisation,
        file_bytes=hosted.model.info.file_bytes,
        kv_bytes=hosted.kv_bytes,
        workers_ready=workers.ready,
        workers_wanted=workers.wanted,
        requests=len(hosted.desk.streams),
        loaded_seconds=time.monotonic() - hosted.loaded_at,
    )


def machine_message(topology: Topology) -> pb.TopologyResponse:
    """The machine; no placements yet."""
    response = pb.TopologyResponse(
        cpus_allowed=topology.cpus_allowed,
        cores=_sets(topology.cores or [(cpu,) for cpu in topology.cpus_allowed]),
        cpu_quota=topology.cpu_quota,
        memory_limit_bytes=topology.memory_limit_bytes,
        memory_available_bytes=topology.memory_available_bytes,
    )
    for place, node in enumerate(topology.nodes):
        distances = topology.distances[place] if topology.distances else ()
        l3 = [group for group in topology.l3 if set(group) & set(node.cpus)]
        response.nodes.add(id=node.id, cpus=node.cpus, memory_bytes=node.memory_bytes, distances=distances, l3=_sets(l3))
    return response


def placement_message(hosted: Hosted) -> pb.Placement:
    """Where a model's weights lie. Any thread."""
    team, info = hosted.team.describe(), hosted.model.info
    placement = pb.Placement(
        model=hosted.name,
        placement=team.placement.placement,
        reason=team.placement.reason,
        load_mode=hosted.team.image.mode,
        bytes=hosted.team.image.kept_bytes,
        shards=[
            pb.Shard(node=share.node, bytes=share.bytes, local_bytes=share.on_node, huge_bytes=share.huge_bytes)
            for share in team.report.shares
            if share.node >= 0
        ],
        degraded=(*team.degraded, *([] if hosted.nodes is None else hosted.nodes.pool.notes)),
        layers=info.layers,
        experts=info.experts,
        experts_per_token=info.top_k,
        expert_bytes=hosted.loads.expert_bytes,
    )
    write_places(placement, hosted.loads.places())
    return placement


def _sets(groups: Iterable[Iterable[int]]) -> list[pb.CpuSet]:
    return [pb.CpuSet(cpus=sorted(group)) for group in groups]
