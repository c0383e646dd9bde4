"""A model with everything that computes it: segments, session, workers. What the service and the command line open."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from engine_c import Model, Session, SessionOptions, session_bytes
from workers import numa
from workers.automatic_config import MIN_GAIN, Automatic, Loads
from workers.confine import stepping_cpus
from workers.keeping import Keep
from workers.kv_memory import KvMemory
from workers.placement import Placement, PlacementPlan
from workers.plan import FrontLane, NodeWish, PlanError, TeamPlan, kv_block_bytes, plan_kv_blocks, plan_team
from workers.scaling import ScaleError, Scaling
from workers.segments import LoadMode, ModelImage, PlacementReport, open_image
from workers.supervisor import Supervisor, SupervisorConfig, SupervisorSnapshot
from workers.topology import Topology, read_topology

if TYPE_CHECKING:
    from workers.automatic import Keeper
    from workers.growing import Share
    from workers.rebalancing import BalanceReport, ExpertPlaces, Rebalancer

log = logging.getLogger("colibri.workers")

__all__ = ["LaneDescription", "ScaleError", "Team", "TeamConfig", "TeamDescription"]


@dataclass(frozen=True, slots=True)
class TeamConfig:
    """How to open a team.

    session.max_lanes and front_lane are taken from the plan; session.kv_blocks 0 is planned from kv_bytes, or if that is None from the
    memory that is free. keep: the share of the model that copies of it have (None: all). grows: it has nothing at first and then what
    Team.hold says. kv_layers: layers whose keys and values are ever written (None: all); the others' take no memory.
    """

    load_mode: LoadMode = "map"
    placement: Placement = "auto"
    keep: Keep | None = None
    grows: bool = False
    workers_per_node: int | None = None
    threads_per_worker: int | None = None
    front_lane: FrontLane = "auto"
    smt: bool = False
    session: SessionOptions = field(default_factory=SessionOptions)
    kv_bytes: int | None = None
    kv_layers: int | None = None
    start_timeout_s: float = 30.0
    rebalance: Literal["off", "auto"] = "off"
    automatic: Automatic = field(default_factory=Automatic)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)


@dataclass(frozen=True, slots=True)
class LaneDescription:
    """A lane that computes; lane max_lanes is the front end's own. Of its tasks since it attached, `homed` had their weights on a node of
    their own and `local` of these were done on that node."""

    lane: int
    node: int
    tasks: int
    local: int
    homed: int


@dataclass(frozen=True, slots=True)
class TeamDescription:
    """What a team is at one moment. degraded says, each thing once, what the machine refused: it serves, but slower than it could."""

    topology: Topology
    placement: PlacementPlan
    report: PlacementReport
    plan: TeamPlan
    workers: SupervisorSnapshot
    lanes: tuple[LaneDescription, ...]
    degraded: tuple[str, ...]


class Team:
    """An opened model, its session and its workers. One thread steps the session; close() once it no longer does."""

    def __init__(
        self,
        *,
        image: ModelImage,
        model: Model,
        session: Session,
        kv_memory: KvMemory,
        supervisor: Supervisor,
        scaling: Scaling,
        topology: Topology,
    ) -> None:
        self.image = image
        self.model = model
        self.session = session
        self.kv_memory = kv_memory
        self.supervisor = supervisor
        self.topology = topology
        self._scaling = scaling
        self._lock = threading.Lock()
        self._moves: Rebalancer | None = None
        self._still = False
        self._keeper: Keeper | None = None
        self._share: Share | None = None
        self._front_degraded: tuple[str, ...] = ()

    @property
    def plan(self) -> TeamPlan:
        """Who computes, as last planned."""
        return self._scaling.plan

    @property
    def reads_file(self) -> bool:
        """Whether what is held is, or in part, the file's own pages, which are gone when the file is cut short. From any thread."""
        return self.image.mode == "map" or (self._share is not None and self._share.reads_file)

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: TeamConfig | None = None, *, machine: Topology | None = None) -> Self:
        """Opens the model and starts the workers; returns when all are ready, else leaves nothing behind.

        machine: what to plan for instead of what is found.
        SegmentError, EngineError (the container), PlanError (not on this machine), SupervisorError (a worker).
        """
        config = config or TeamConfig()
        topology = machine or read_topology()
        if config.smt and topology.has_siblings:
            log.warning("SMT siblings get lanes of their own: two lanes then share a core, which is seldom faster; measure it")
        wish = NodeWish(config.workers_per_node, config.threads_per_worker)
        plan = plan_team(topology, default=wish, front_lane=config.front_lane, smt=config.smt)
        if config.grows:
            from workers.growing import open_growing

            image = open_growing(path, mode=config.load_mode, placement=config.placement, topology=topology)
        else:
            image = open_image(
                path, mode=config.load_mode, placement=config.placement, topology=topology, keep=config.keep, complete=False
            )
        log.info("weights: load mode %s, placement %s: %s", image.mode, image.placement.placement, image.placement.reason)
        model: Model | None = None
        session: Session | None = None
        supervisor: Supervisor | None = None
        try:
            model = Model.open_parts(image.parts_for(plan.front_node))
            pending = image.pending  # before it is asked what is free: what is copied in between then counts twice rather than never
            free = max(0, read_topology().memory_available_bytes - pending)
            topology = replace(topology, memory_available_bytes=free)
            session = Session(model, _session_options(model, plan, topology, config, image.placement))
            kv_memory = KvMemory(session, image.placement.nodes)
            kv_memory.bind()
            session.lane_place(plan.max_lanes, plan.front_node)
            supervisor = Supervisor(session, image, plan, config.supervisor)
            supervisor.begin()  # the workers start while the copy is made
            image.complete()
            if refused := (*image.report.degraded, *kv_memory.degraded):
                log.warning("served all the same, but slower than it could be: %s", "; ".join(refused))
            supervisor.wait_ready(config.start_timeout_s)
        except BaseException:
            if supervisor is not None:
                supervisor.stop()
            for part in (session, model, image):
                if part is not None:
                    part.close()
            raise
        scaling = Scaling(supervisor, topology, plan, default=wish, front_lane=config.front_lane, smt=config.smt)
        team = cls(
            image=image,
            model=model,
            session=session,
            kv_memory=kv_memory,
            supervisor=supervisor,
            scaling=scaling,
            topology=topology,
        )
        if config.grows:
            from workers.growing import Share

            team._share = Share(image, (model, supervisor, plan.front_node), topology, mode=config.load_mode)
        if config.rebalance == "auto":
            from workers.automatic import Keeper

            team._keeper = Keeper(team._rebalancer, team._counts, config.automatic)
        return team

    def settle(self) -> None:
        """Keeps the calling thread, which is to step the session, on the front end's CPU, or where that is nobody's in particular on its
        node, with memory of that node."""
        refused = []
        if cpus := stepping_cpus(self.plan):
            refused.append(numa.run_on(cpus))
        memory = self.topology.nearest_memory(self.plan.front_node)
        if len(self.topology.nodes) > 1 and memory is not None:
            refused.append(numa.prefer_memory(memory))
        self._front_degraded = tuple(f"front end: {text}" for text in refused if text)

    def scale(self, node: int | None, *, workers: int | None = None, threads: int | None = None, timeout: float = 30.0) -> TeamPlan:
        """Gives a node (None: all) so many workers of so many lanes (None: as it is), while the session steps. Returns the
        plan once it holds.

        ScaleError if that can't be had, within timeout seconds, with the former workers put back. The same again changes nothing.
        """
        return self._scaling.scale(node, workers=workers, threads=threads, timeout=timeout)

    def drain_worker(self, index: int, timeout: float = 30.0) -> TeamPlan:
        """Sends a worker away until it is restarted or its node scaled. KeyError: there is no such worker. ScaleError."""
        return self._scaling.drain_worker(index, timeout)

    def drain_node(self, node: int, timeout: float = 30.0) -> TeamPlan:
        """Sends a node's workers away until they are restarted or the node is scaled. KeyError: there is no such node. ScaleError."""
        return self._scaling.drain_node(node, timeout)

    def restart_worker(self, index: int, timeout: float = 30.0) -> TeamPlan:
        """Makes a worker anew. KeyError: there is no such worker. ScaleError."""
        return self._scaling.restart_worker(index, timeout)

    def balance(self) -> ExpertPlaces:
        """Where every expert and each of its copies lies now. From any thread."""
        return self._rebalancer.places()

    def rebalance(
        self,
        load: Loads | None = None,
        *,
        dry_run: bool = False,
        replicas: int = 0,
        min_gain: float = MIN_GAIN,
        timeout: float = 60.0,
    ) -> BalanceReport:
        """Puts experts, and up to `replicas` further copies a layer, where the nodes' work becomes even, while the session steps. Returns
        when it is done or time is up. What does not pay, by min_gain, is left. From any thread.

        load: tokens of each expert [layers][experts]; None: all since the session was opened. ValueError if it does not fit the model,
        TimeoutError if another rebalancing goes on for all that time.
        """
        load = self._counts() if load is None else load
        return self._rebalancer.rebalance(load, dry_run=dry_run, replicas=replicas, min_gain=min_gain, timeout=timeout)

    def stop_moving(self) -> None:
        """Lets experts lie where they do from now on: a rebalancing that is under way ends soon, which is waited for. From any thread."""
        with self._lock:
            self._still, moves = True, self._moves
        if moves is not None:
            moves.close()

    def hold(self, experts: frozenset[tuple[int, int]]) -> None:
        """Holds these (layer, expert), and no others, in memory from now on, while the session steps, from any thread; of a team that
        grows. ShareError: nothing has changed."""
        if self._share is None:
            from workers.growing import ShareError

            raise ShareError("this team's share was fixed at its start")
        self._share.hold(experts)

    @property
    def _rebalancer(self) -> Rebalancer:
        """Made when it is first asked for: most teams move nothing, and start without what that needs."""
        from workers.rebalancing import Rebalancer

        with self._lock:
            if self._moves is None:
                node = self.plan.front_node
                self._moves = Rebalancer(
                    self.image, self.model, self.supervisor, self.topology, front_node=node, speeds=self._lanes_of_nodes
                )
                if self._still:
                    self._moves.close()
            return self._moves

    def _counts(self) -> list[list[float]]:
        counts: list[list[float]] = self.session.expert_counts().astype(float).tolist()
        return counts

    def _lanes_of_nodes(self) -> dict[int, float]:
        plan = self.plan
        lanes: dict[int, float] = {plan.front_node: 1.0} if plan.front_lane else {}
        for spec in plan.workers:
            lanes[spec.node] = lanes.get(spec.node, 0.0) + len(spec.lanes)
        return lanes

    def describe(self) -> TeamDescription:
        """What there is now. From any thread."""
        plan, workers = self.plan, self.supervisor.snapshot()
        refused = [text for worker in workers.workers for text in worker.degraded]
        moved = () if self._moves is None else self._moves.degraded
        degraded = (*self.image.report.degraded, *self.kv_memory.degraded, *self._front_degraded, *moved, *refused)
        lanes = [(lane, spec.node) for spec in plan.workers for lane in spec.lanes]
        if plan.front_lane:
            lanes.append((plan.max_lanes, plan.front_node))
        return TeamDescription(
            topology=self.topology,
            placement=self.image.placement,
            report=self.image.report,
            plan=plan,
            workers=workers,
            lanes=tuple(self._lane(lane, node) for lane, node in lanes),
            degraded=tuple(dict.fromkeys(filter(None, degraded))),
        )

    def _lane(self, lane: int, node: int) -> LaneDescription:
        session = self.session
        return LaneDescription(lane, node, session.lane_tasks(lane), session.lane_local(lane), session.lane_homed(lane))

    def close(self) -> None:
        """Drains and ends the workers, then frees everything. No step may be running."""
        self.stop_moving()
        if self._keeper is not None:
            self._keeper.close()
        self.supervisor.stop()
        self.session.close()
        self.model.close()
        self.image.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _session_options(model: Model, plan: TeamPlan, topology: Topology, config: TeamConfig, placement: PlacementPlan) -> SessionOptions:
    """The wish with the plan's lanes and with KV memory; PlanError if the whole does not fit into memory."""
    split_down = int(placement.placement == "experts" or bool(config.session.split_down))
    wish = replace(config.session, max_lanes=plan.max_lanes, front_lane=int(plan.front_lane), split_down=split_down)
    written = model.info if config.kv_layers is None else replace(model.info, layers=config.kv_layers)
    if not wish.kv_blocks:
        blocks = plan_kv_blocks(written, kv_bytes=config.kv_bytes, topology=topology, kv_format=wish.kv_format, max_seqs=wish.max_seqs)
        wish = replace(wish, kv_blocks=blocks)
    unwritten = kv_block_bytes(model.info, wish.kv_format) - kv_block_bytes(written, wish.kv_format)
    needed = session_bytes(model, wish) - unwritten * wish.kv_blocks
    if needed > topology.memory_available_bytes:
        raise PlanError(
            f"the session needs {needed >> 20} MiB of shared memory ({wish.kv_blocks} KV blocks, {wish.max_rows} rows), "
            f"{topology.memory_available_bytes >> 20} MiB is free: ask for less KV memory or fewer rows"
        )
    return wish
