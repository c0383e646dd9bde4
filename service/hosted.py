"""A model with everything that serves it: its team, its engine thread, its desk, its metrics. All but `open` on the loop's thread."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from colibri.v1 import inference_pb2 as pb
from engine_c import KV_BLOCK, LANE_ACTIVE, LANE_READY, Damping
from service.artifact import Artifact, ArtifactError
from service.blocks import BlockPool
from service.config import ConfigError, ServeConfig
from service.desk import Desk
from service.engine import EngineThread
from service.health import can_serve
from service.load_watch import LoadWatch
from service.metrics import Metrics, Snapshot
from service.plan import Limits
from service.routing import policy_message
from service.scheduler import Scheduler
from service.served import ServedModel, load_texts, make_served
from workers.lifecycle import State as WorkerState
from workers.plan import kv_block_bytes
from workers.team import Team

if TYPE_CHECKING:
    from service.nodes.nodes import Nodes

log = logging.getLogger("colibri.service")
_Result = TypeVar("_Result")
_LOOK_CLOSER = 0.2  # seconds after which it is asked what became of the workers
_PATIENCE = 1.0  # seconds that nothing may compute before new requests are refused: a worker that died is back sooner


class ModelState(Enum):
    """Where a model is in its life."""

    LOADING = "loading"
    READY = "ready"  # takes requests that name it
    SERVING = "serving"  # the default: also those that name none
    DRAINING = "draining"  # finishes what it has


TRANSITIONS: dict[ModelState, frozenset[ModelState]] = {
    ModelState.LOADING: frozenset({ModelState.READY}),
    ModelState.READY: frozenset({ModelState.SERVING, ModelState.DRAINING}),
    ModelState.SERVING: frozenset({ModelState.READY}),
    ModelState.DRAINING: frozenset(),
}


class Hosted:
    """One loaded model. Its engine runs; whether it is the default is its host's business."""

    def __init__(self, config: ServeConfig, team: Team, model: ServedModel, metrics: Metrics, nodes: Nodes | None) -> None:
        self.config = config
        self.nodes = nodes
        self.team = team
        self.model = model
        self.metrics = metrics.model(model.name)
        self.engine = EngineThread(
            team.session,
            _scheduler(team, config),
            lane_grace=config.lane_grace,
            stream_interval=None if config.stream_interval_ms is None else config.stream_interval_ms / 1000,
            settle=team.settle,
            elsewhere=None if nodes is None else nodes.remote,
        )
        self.desk = Desk(self.engine, stream_limit=config.stream_buffer_tokens, stream_patience=config.stream_patience)
        self.loads = LoadWatch(team)
        self.loaded_at = time.monotonic()
        self.damping = _default_damping(config, model)  # as operators have set it
        self.state = ModelState.LOADING
        self.closing = False  # from here on the team must not be touched
        self.changes = asyncio.Lock()  # of the workers: one after the other
        self._gone_since: float | None = None
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @classmethod
    async def open(cls, config: ServeConfig, artifact: Artifact, metrics: Metrics, opening: Future[Team]) -> Self:
        """Starts what serves a model whose team is being opened (service.opening). On failure nothing is left behind."""
        texts = asyncio.create_task(asyncio.to_thread(load_texts, artifact))
        team_opens = asyncio.ensure_future(asyncio.wrap_future(opening))
        await asyncio.wait((texts, team_opens))
        replaced = team_opens.exception() is None and team_opens.result().image.digest != artifact.digest
        if (replaced or texts.exception() is not None) and team_opens.exception() is None:
            await asyncio.to_thread(team_opens.result().close)
        team, (tokenizer, template) = team_opens.result(), texts.result()
        if replaced:
            raise ArtifactError(f"{artifact.path}: another file took its name while it was being opened: open it again")
        model = make_served(
            artifact,
            team.model.info,
            tokenizer,
            template,
            name=config.name,
            kv_tokens=team.session.options.kv_blocks * KV_BLOCK,
            default_max_tokens=config.default_max_tokens,
        )
        nodes = None
        if config.nodes:
            try:
                nodes = await asyncio.to_thread(_open_nodes, config, artifact, team)
            except ConfigError:
                await asyncio.to_thread(team.close)
                raise
        hosted = cls(config, team, model, metrics, nodes)
        if nodes is not None:
            nodes.keep_balanced(config, lambda: team.session.expert_counts().tolist())
        hosted.engine.start(asyncio.get_running_loop(), hosted.desk.deliver)
        hosted.move(ModelState.READY)
        return hosted

    @property
    def name(self) -> str:
        """In requests."""
        return self.model.name

    @property
    def path(self) -> Path:
        """Of the container."""
        return self.model.artifact.path

    @property
    def kv_bytes(self) -> int:
        """Of all KV blocks."""
        options = self.team.session.options
        return options.kv_blocks * kv_block_bytes(self.team.model.info, options.kv_format)

    @property
    def takes_requests(self) -> bool:
        """Whether requests may name it."""
        return self.state in (ModelState.READY, ModelState.SERVING)

    @property
    def usual_damping(self) -> Damping | None:
        """Of requests that name neither a policy nor a seed; none while nodes run whole layers."""
        return None if self.nodes is not None and self.nodes.remote.whole_layers else self.damping

    def move(self, target: ModelState) -> None:
        """Changes state. RuntimeError for a change the table does not have: a bug of ours."""
        if target not in TRANSITIONS[self.state]:
            raise RuntimeError(f"model {self.name!r} can't go from {self.state.value} to {target.value}")
        self.state = target

    def describe(self) -> pb.Model:
        """As GetModel tells it."""
        described = self.model.describe()
        described.is_default = self.state is ModelState.SERVING
        described.routing_default.CopyFrom(policy_message(self.usual_damping))
        return described

    async def aside(self, work: Callable[[Self], _Result]) -> _Result:
        """Runs in a thread what may wait for others. The model stays open until it has ended, even if the caller goes away."""
        self._users += 1
        self._unused.clear()
        running = asyncio.ensure_future(asyncio.to_thread(work, self))
        running.add_done_callback(self._leave)
        return await asyncio.shield(running)

    def _leave(self, ended: asyncio.Future[Any]) -> None:
        self._users -= 1
        if not self._users:
            self._unused.set()
        if not ended.cancelled():
            ended.exception()  # retrieved, should the caller have gone

    async def close(self) -> None:
        """Ends the engine and the workers and frees everything. Requests that are left get no more news."""
        self.closing = True
        await self.stop_moving()
        await self._unused.wait()
        # A step must have ended before the session may be freed; one that never does is left to the end of the process.
        if not await asyncio.to_thread(self.engine.stop):
            log.critical("the engine of %s is stuck in a step; ending the process with everything still open", self.name)
            os._exit(1)
        self.metrics.forget()
        if self.nodes is not None:
            await asyncio.to_thread(self.nodes.close)
        await asyncio.to_thread(self.team.close)

    async def stop_moving(self) -> None:
        """Lets the experts lie where they do from now on; a rebalancing under way ends soon."""
        if self.nodes is not None:
            self.nodes.balancer.close()
        await asyncio.to_thread(self.team.stop_moving)

    # ------------------------------------------------------------ health and numbers

    def look(self, now: float) -> bool:
        """Whether a request sent now would be computed. If none would be for long, the desk refuses new ones from here on."""
        missing = "" if self.nodes is None else self.nodes.remote.missing()
        computes = self._anyone_computes() and not missing
        self.desk.nodes_lost = self.nodes.remote.missing if self.nodes is not None and missing else None
        if computes:
            self._gone_since, self.desk.unable = None, ""
        else:
            self._gone_since = self._gone_since or now
            gone = now - self._gone_since
            self.desk.unable = self._why_unable(gone) if not missing else missing if gone >= min(_PATIENCE, self.config.lane_grace) else ""
        return can_serve(self.engine.progress, now=now, stall_after=self.config.stall_after, anyone_computes=computes)

    async def look_at_experts(self) -> None:
        """Lets the moving windows of their load move on."""
        if not self.closing and self.loads.due(self.engine.steps):
            await self.aside(lambda _: self.loads.look())

    def snapshot(self) -> Snapshot:
        """What the metrics tell. Any thread."""
        scheduler, totals = self.engine.stats()
        workers = self.team.supervisor.snapshot()
        return Snapshot(scheduler, totals, workers.ready, workers.wanted, workers.restarts, self.loads, self.nodes)

    def _anyone_computes(self) -> bool:
        session = self.team.session
        return bool(session.options.front_lane) or any(
            session.lane_state(lane) in (LANE_READY, LANE_ACTIVE) for lane in range(session.options.max_lanes)
        )

    def _why_unable(self, gone: float) -> str:
        """Why new requests should not even wait; "" while a worker may soon be back."""
        if gone < _LOOK_CLOSER:  # the supervisor has its hands full just now, and its lock; health must not wait for that
            return ""
        workers = self.team.supervisor.snapshot().workers
        hopeless = all(worker.state is WorkerState.FAILED for worker in workers)
        if not hopeless and gone < min(_PATIENCE, self.config.lane_grace):
            return ""
        ends = [f"worker {worker.index} {worker.error}" for worker in workers if worker.error]
        return ends[0] if ends else "no worker has joined"


def _open_nodes(config: ServeConfig, artifact: Artifact, team: Team) -> Nodes:
    from service.nodes.nodes import open_nodes  # here: most servers have no nodes, and start without what they need

    return open_nodes(config, artifact, team.model.info, kv_blocks=team.session.options.kv_blocks)


def _default_damping(config: ServeConfig, model: ServedModel) -> Damping | None:
    damping = config.default_damping
    if damping is not None and not model.info.router_layers:
        log.warning("model %s has no router: damping %s is not for it", model.name, damping.kind)
        return None
    return damping


def _scheduler(team: Team, config: ServeConfig) -> Scheduler:
    options = team.session.options
    limits = Limits(
        max_rows=options.max_rows,
        max_seqs=options.max_seqs,
        max_logit_rows=options.max_logit_rows,
        max_queue=config.max_queue,
        max_queue_tokens=config.max_queue_tokens,
        prefill_seconds=config.prefill_seconds,
        max_slots=options.max_slots,
        router_layers=team.model.info.router_layers,
    )
    return Scheduler(limits, BlockPool(options.kv_blocks))
