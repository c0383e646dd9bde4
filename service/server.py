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
from concurrent.futures import Future

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # workers are exec'd; nothing forks once grpc runs

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from colibri.v1 import experts_pb2, experts_pb2_grpc, inference_pb2
from service.address import check_address
from service.artifact import read_artifact
from service.collector import calm_collector
from service.config import ConfigError, ServeConfig, unknown_variables
from service.experts import ANSWER_BYTES, ExpertsServicer
from service.health import EXPERTS, LIVENESS, READINESS, HealthServicer
from service.hosted import Hosted
from service.inference import InferenceServicer, add_inference
from service.load_watch import LOOK_EVERY
from service.loop import ServerLoop
from service.metrics import Metrics, Snapshot
from service.models import ModelHost
from service.opening import SWITCH, begin_opening
from service.operator_server import OperatorServer
from service.printable import counted
from service.reading import ReadingInterceptor
from workers.confine import FrontThreads
from workers.team import Team

log = logging.getLogger("colibri.service")
_HEALTH_EVERY = 0.05  # seconds between looks at the engine
_LAME = 0.25  # seconds in which callers that watch readiness hear of its end and turn elsewhere, before what they begin would be cancelled
_FAREWELL = 1.0  # seconds for the statuses of broken-off calls to reach their callers
_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    experts_pb2.DESCRIPTOR.services_by_name["Experts"].full_name,
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


def _warn_of_unknown_variables() -> None:
    for name, meant in unknown_variables().items():
        hint = f"; {meant} was meant?" if meant else ""
        log.warning("the environment variable %s means nothing to this version and is ignored%s", name, hint)


class Server:
    """Models behind one address. `run()` is its whole life; startup, serve and shutdown are its parts, for one event loop."""

    def __init__(self, config: ServeConfig, opening: Future[Team] | None = None) -> None:
        """`opening`: the team of config.model, if that was begun before."""
        self.config = config
        self._opening = opening
        self.metrics = Metrics()
        self.host = ModelHost(config, self.metrics)
        self.health = HealthServicer()
        self.operators = OperatorServer(self.host, config)
        self.port = 0  # bound; 0 on a unix socket
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._watches: list[asyncio.Task[None]] = []
        self._threads: FrontThreads | None = None
        self._undo = contextlib.AsyncExitStack()

    @property
    def default(self) -> Hosted:
        """The default model with what serves it."""
        return self.host.default

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT and drains. Raises ConfigError, or what the engine and workers raise, if it cannot start.

        The process is the server's own: all its threads are kept where they belong.
        """
        sys.setswitchinterval(SWITCH)
        self._threads = FrontThreads()
        with asyncio.Runner(loop_factory=ServerLoop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        with self._signals():
            await self.startup()
            calm_collector()
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
        _warn_of_unknown_variables()
        if self._opening is not None:
            undo.push_async_callback(self._close_unused)
        artifact = read_artifact(config.model)
        await asyncio.to_thread(check_address, config)
        undo.push_async_callback(self.host.close)
        opening, self._opening = self._opening or begin_opening(config), None
        await self.host.start(artifact, opening)
        self.metrics.read_from(self._snapshots, experts=config.metrics_experts)
        undo.callback(self.metrics.close)
        self._start_metrics()
        await self._listen()
        await self.operators.start(self.port)
        undo.push_async_callback(self.operators.stop)
        for watch in (self._watch_engines(), self._watch_experts()):
            self._watches.append(asyncio.create_task(watch))
            undo.callback(self._watches[-1].cancel)
        self._look_at_engines()
        log.info("serving %s on %s (worker processes: %d)", self.default.name, self._listening, len(self.default.team.plan.workers))
        log.info("operators: %s", ", ".join(self.operators.places) or "nowhere")

    async def _close_unused(self) -> None:
        """A team that was opened for nothing."""
        if self._opening is not None:
            with contextlib.suppress(Exception):  # it is the other failure that is told
                team = await asyncio.wrap_future(self._opening)
                await asyncio.to_thread(team.close)

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

    def _start_metrics(self) -> None:
        if self.config.metrics_port is None:
            return
        try:
            self.metrics.serve(self.config.metrics_host, self.config.metrics_port)
        except OSError as error:
            where = f"{self.config.metrics_host}:{self.config.metrics_port}"
            raise ConfigError(f"metrics cannot be served on {where}: {error.strerror or error}; choose another metrics_port") from error

    async def _listen(self) -> None:
        usual = max(self.default.model.bounds.message_bytes, ANSWER_BYTES if self.config.experts_api else 0)
        options = channel_options(self.config.max_message_bytes or usual)
        checks = (ReadingInterceptor(lambda code: self.default.metrics.count_failure(code)),)
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=self.config.rpcs, interceptors=checks)
        add_inference(InferenceServicer(self.host), server)
        experts_pb2_grpc.add_ExpertsServicer_to_server(ExpertsServicer(self.host, streams=max(1, self.config.rpcs // 4)), server)
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
        for service in (READINESS, EXPERTS):
            self.health.set(service, serving=False)
        self.host.drain()
        log.info("draining %s, for %.0f s at the most", counted(self.host.calls, "call"), self.config.drain_grace)
        idle = asyncio.create_task(self._leave())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((idle, hurry), return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurry):
            task.cancel()
        if self.host.calls:
            log.warning("breaking off %s", counted(self.host.calls, "call"))
            self.host.break_off()
            await self.host.wait_idle(_FAREWELL)

    async def _leave(self) -> None:
        await asyncio.gather(self.host.wait_idle(self.config.drain_grace), asyncio.sleep(_LAME))

    async def shutdown(self) -> None:
        """Closes everything, in reverse order of startup. A call that is still under way sees UNAVAILABLE or is cancelled."""
        await self._undo.aclose()
        log.info("stopped")

    # ------------------------------------------------------------ health and numbers

    async def _watch_engines(self) -> None:
        while True:
            self._look_at_engines()
            await asyncio.sleep(_HEALTH_EVERY)

    async def _watch_experts(self) -> None:
        while True:
            for hosted in self.host.models:
                await hosted.look_at_experts()
            await asyncio.sleep(LOOK_EVERY)

    def _look_at_engines(self) -> None:
        now, default, draining = time.monotonic(), self.default, self.host.draining
        services = {LIVENESS, READINESS, EXPERTS}
        for hosted in self.host.models:
            serving = hosted.look(now) and hosted.takes_requests and not draining
            for service in (READINESS, EXPERTS):
                services.add(f"{service}/{hosted.name}")
                self.health.set(f"{service}/{hosted.name}", serving=serving)
                if hosted is default:
                    self.health.set(service, serving=serving)
        self.health.set(LIVENESS, serving=default.engine.progress.alive)
        self.health.keep(services)
        self._keep_threads()

    def _keep_threads(self) -> None:
        """Puts this process's threads where the workers of all models leave room."""
        if self._threads is None:
            return
        teams = [(hosted.team.plan, hosted.engine.thread_id) for hosted in self.host.models if not hosted.closing]
        if refused := self._threads.keep(teams):
            log.warning("threads of the front end may hold up lanes: %s", refused)

    def _snapshots(self) -> dict[str, Snapshot]:
        return {hosted.name: hosted.snapshot() for hosted in self.host.models}

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
