"""A model with everything that computes it: segments, session, workers. What the service and the command line open."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from engine_c import Model, Session, SessionOptions, session_bytes
from workers.plan import FrontLane, PlanError, TeamPlan, plan_kv_blocks, plan_team
from workers.segments import LoadMode, ModelSegment, open_segment
from workers.supervisor import Supervisor, SupervisorConfig
from workers.topology import Topology, read_topology


@dataclass(frozen=True, slots=True)
class TeamConfig:
    """How to open a team.

    session.max_lanes and front_lane are taken from the plan; session.kv_blocks 0 is planned from kv_bytes, or if that is None from the
    memory that is free.
    """

    load_mode: LoadMode = "map"
    workers_per_node: int | None = None
    threads_per_worker: int | None = None
    front_lane: FrontLane = "auto"
    session: SessionOptions = field(default_factory=SessionOptions)
    kv_bytes: int | None = None
    start_timeout_s: float = 30.0
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)


class Team:
    """An opened model, its session and its workers. One thread steps the session; close() once it no longer does."""

    def __init__(
        self, *, segment: ModelSegment, model: Model, session: Session, supervisor: Supervisor, plan: TeamPlan, topology: Topology
    ) -> None:
        self.segment = segment
        self.model = model
        self.session = session
        self.supervisor = supervisor
        self.plan = plan
        self.topology = topology

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: TeamConfig | None = None) -> Self:
        """Opens the model and starts the workers; returns when all are ready, else leaves nothing behind.

        SegmentError, EngineError (the container), PlanError (not on this machine), SupervisorError (a worker).
        """
        config = config or TeamConfig()
        topology = read_topology()
        plan = plan_team(
            topology,
            workers_per_node=config.workers_per_node,
            threads_per_worker=config.threads_per_worker,
            front_lane=config.front_lane,
        )
        segment = open_segment(path, mode=config.load_mode)
        model: Model | None = None
        session: Session | None = None
        try:
            model = Model.from_fd(segment.fd)
            topology = read_topology()  # again: a copy of the model may have taken memory
            session = Session(model, _session_options(model, plan, topology, config))
            supervisor = Supervisor(session, segment.fd, plan, config.supervisor)
            supervisor.start(config.start_timeout_s)
        except BaseException:
            for part in (session, model, segment):
                if part is not None:
                    part.close()
            raise
        return cls(segment=segment, model=model, session=session, supervisor=supervisor, plan=plan, topology=topology)

    def close(self) -> None:
        """Drains and ends the workers, then frees everything. No step may be running."""
        self.supervisor.stop()
        self.session.close()
        self.model.close()
        self.segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _session_options(model: Model, plan: TeamPlan, topology: Topology, config: TeamConfig) -> SessionOptions:
    """The wish with the plan's lanes and with KV memory; PlanError if the whole does not fit into memory."""
    wish = replace(config.session, max_lanes=plan.max_lanes, front_lane=int(plan.front_lane))
    if not wish.kv_blocks:
        blocks = plan_kv_blocks(model.info, kv_bytes=config.kv_bytes, topology=topology, kv_format=wish.kv_format, max_seqs=wish.max_seqs)
        wish = replace(wish, kv_blocks=blocks)
    needed = session_bytes(model, wish)
    if needed > topology.memory_available_bytes:
        raise PlanError(
            f"the session needs {needed >> 20} MiB of shared memory ({wish.kv_blocks} KV blocks, {wish.max_rows} rows), "
            f"{topology.memory_available_bytes >> 20} MiB is free: ask for less KV memory or fewer rows"
        )
    return wish
