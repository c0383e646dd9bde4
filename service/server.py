"""The server: startup, serve until told to stop, shutdown. Everything is built here and torn down in reverse order.

SIGTERM drains: readiness turns NOT_SERVING, new calls get UNAVAILABLE, those under way finish within the grace. A second signal hurries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # workers are exec'd; nothing forks once grpc runs

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from colibri.v1 import inference_pb2, inference_pb2_grpc
from engine_c import KV_BLOCK, KV_FORMATS, LANE_ACTIVE, LANE_READY, SessionOptions
from service.address import check_address
from service.artifact import Artifact, read_artifact
from service.blocks import BlockPool
from service.config import ConfigError, ServeConfig
from service.desk import Desk
from service.engine import EngineThread
from service.health import LIVENESS, READINESS, HealthServicer, can_serve
from service.inference import InferenceServicer
from service.metrics import Metrics, Snapshot
from service.plan import Limits
from service.reading import ReadingInterceptor
from service.scheduler import Scheduler
from service.served import ServedModel, make_served
from workers.team import Team, TeamConfig

log = logging.getLogger("colibri.service")
_HEALTH_EVERY = 0.1  # seconds between looks at the engine
_SWITCH = 0.0002  # seconds; Python's 5 ms is how long the engine thread would wait between steps while the loop has messages to write
_FAREWELL = 1.0  # seconds for the statuses of broken-off calls to reach their callers
_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    reflection.SERVICE_NAME,
)


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Clients may ping every 10 s, also while nothing is sent, and are pinged each 30 s, so that a dead one is noticed."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def team_config(config: ServeConfig) -> TeamConfig:
    """The part of the settings that the engine and its workers are built from."""
    options = SessionOptions(
        max_rows=config.max_rows,
        max_seqs=config.max_seqs,
        max_logit_rows=config.logit_rows,
        kv_format=KV_FORMATS[config.kv_format],
        spin_us=config.spin_us,
        hang_ms=config.hang_ms,
    )
    return TeamConfig(
        load_mode=config.load,
        workers_per_node=config.workers_per_node,
        threads_per_worker=config.threads_per_worker,
        front_lane=config.front_lane,
        session=options,
        kv_bytes=config.kv_memory,
        start_timeout_s=config.start_timeout,
    )


class Server:
    """One model behind one address. `run()` is its whole life; startup, serve and shutdown are its parts, for one event loop."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.model: ServedModel
        self.team: Team
        self.engine: EngineThread
        self.desk: Desk
        self.metrics: Metrics
        self.health: HealthServicer
        self.port = 0  # bound; 0 on a unix socket
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._undo = contextlib.AsyncExitStack()

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT and drains. Raises ConfigError, or what the engine and workers raise, if it cannot start."""
        sys.setswitchinterval(_SWITCH)
        asyncio.run(self._run())

    async def _run(self) -> None:
        with self._signals():
            await self.startup()
            try:
                await self.serve()
            finally:
                await self.shutdown()

    # ------------------------------------------------------------ startup

    async def startup(self) -> None:
        """Opens the model, starts the workers and listens. On failure nothing is left behind."""
        try:
            await self._start()
        except BaseException:
            await self._undo.aclose()
            raise

    async def _start(self) -> None:
        config, undo = self.config, self._undo
        artifact = read_artifact(config.model)
        await asyncio.to_thread(check_address, config)
        self.team = await asyncio.to_thread(Team.open, config.model, team_config(config))
        undo.push_async_callback(asyncio.to_thread, self.team.close)
        self.model = self._make_model(artifact)
        self.metrics = Metrics(self.model.name)
        self.engine = EngineThread(self.team.session, self._make_scheduler(), lane_grace=config.lane_grace)
        self.desk = Desk(self.engine, stream_limit=config.stream_buffer_tokens, stream_patience=config.stream_patience)
        self.engine.start(asyncio.get_running_loop(), self.desk.deliver)
        undo.push_async_callback(self._stop_engine)
        self.metrics.read_from(self._snapshot)
        undo.callback(self.metrics.close)
        self._start_metrics()
        self.health = HealthServicer()
        await self._listen()
        self._watch = asyncio.create_task(self._watch_engine())
        undo.callback(self._watch.cancel)
        self._look_at_engine()
        log.info("serving %s on %s (worker processes: %d)", self.model.name, self._listening, len(self.team.plan.workers))

    @property
    def target(self) -> str:
        """Where a client on this machine finds the server."""
        if self.config.unix_socket:
            return self.config.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(self.config.host, self.config.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def _listening(self) -> str:
        """The address listened on, with the port that was taken."""
        return self.config.address if self.config.unix_socket else self.config.with_(port=self.port).address

    def _make_model(self, artifact: Artifact) -> ServedModel:
        return make_served(
            artifact,
            self.team.model.info,
            name=self.config.name,
            kv_tokens=self.team.session.options.kv_blocks * KV_BLOCK,
            default_max_tokens=self.config.default_max_tokens,
        )

    def _make_scheduler(self) -> Scheduler:
        options = self.team.session.options
        limits = Limits(
            max_rows=options.max_rows,
            max_seqs=options.max_seqs,
            max_logit_rows=options.max_logit_rows,
            max_queue=self.config.max_queue,
            max_queue_tokens=self.config.max_queue_tokens,
            prefill_seconds=self.config.prefill_seconds,
        )
        return Scheduler(limits, BlockPool(options.kv_blocks))

    async def _stop_engine(self) -> None:
        """A step must have ended before the session may be freed; one that never does is left to the end of the process."""
        if not await asyncio.to_thread(self.engine.stop):
            log.critical("the engine is stuck in a step; ending the process with everything still open")
            os._exit(1)

    def _start_metrics(self) -> None:
        if self.config.metrics_port is None:
            return
        try:
            self.metrics.serve(self.config.metrics_host, self.config.metrics_port)
        except OSError as error:
            where = f"{self.config.metrics_host}:{self.config.metrics_port}"
            raise ConfigError(f"metrics cannot be served on {where}: {error.strerror or error}; choose another metrics_port") from error

    async def _listen(self) -> None:
        options = channel_options(self.config.max_message_bytes or self.model.bounds.message_bytes)
        checks = (ReadingInterceptor(self.metrics),)
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=self.config.rpcs, interceptors=checks)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(self.model, self.desk, self.metrics), server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        reflection.enable_server_reflection(_SERVICES, server)
        try:
            self.port = server.add_insecure_port(self.config.address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {self.config.address}: {error}; choose another port or host") from error
        if self.config.unix_socket:
            self.port = 0
        self._undo.push_async_callback(server.stop, _FAREWELL)
        await server.start()

    # ------------------------------------------------------------ serving

    async def serve(self) -> None:
        """Returns when told to stop, by a signal or request_stop, and drained."""
        await self._stop.wait()
        await self.drain()

    def request_stop(self) -> None:
        """What the signals do: the first time drain, the second time hurry. On the loop's thread."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def drain(self) -> None:
        """Readiness off, nothing new taken, what is under way finished within the grace or until hurried."""
        self.health.set(READINESS, serving=False)
        self.desk.drain()
        log.info("draining %d calls, for %.0f s at the most", self.desk.calls, self.config.drain_grace)
        idle = asyncio.create_task(self.desk.wait_idle(self.config.drain_grace))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((idle, hurry), return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurry):
            task.cancel()
        if self.desk.calls:
            log.warning("breaking off %d calls", self.desk.calls)
            self.desk.break_off()
            await self.desk.wait_idle(_FAREWELL)

    async def shutdown(self) -> None:
        """Closes everything, in reverse order of startup. A call that is still under way sees UNAVAILABLE or is cancelled."""
        await self._undo.aclose()
        log.info("stopped")

    # ------------------------------------------------------------ health and numbers

    async def _watch_engine(self) -> None:
        while True:
            self._look_at_engine()
            await asyncio.sleep(_HEALTH_EVERY)

    def _look_at_engine(self) -> None:
        progress = self.engine.progress
        serving = not self.desk.draining and can_serve(
            progress, now=time.monotonic(), stall_after=self.config.stall_after, anyone_computes=self._anyone_computes()
        )
        self.health.set(READINESS, serving=serving)
        self.health.set(LIVENESS, serving=progress.alive)

    def _anyone_computes(self) -> bool:
        session = self.team.session
        return bool(session.options.front_lane) or any(
            session.lane_state(lane) in (LANE_READY, LANE_ACTIVE) for lane in range(session.options.max_lanes)
        )

    def _snapshot(self) -> Snapshot:
        scheduler, totals = self.engine.stats()
        workers = self.team.supervisor.snapshot()
        restarts = sum(worker.restarts for worker in workers.workers)
        return Snapshot(scheduler, totals, workers.ready, workers.wanted, restarts)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
