"""A node's server: opens the share, answers until told to stop, drains.

SIGTERM: the description says DRAINING, which whoever waits for news hears at once, and readiness NOT_SERVING; streams go on until their
front ends have left or ask for nothing for a while, or the grace is over. A second signal hurries.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from service.transport import FEWER_HOPS, VARIABLE

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # workers are exec'd; nothing forks once grpc runs
os.environ.setdefault(VARIABLE, FEWER_HOPS)

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from colibri.v1 import experts_pb2, node_pb2, node_pb2_grpc
from service.address import check_pair, check_port, read_pem
from service.config import ConfigError
from service.exposition import serve_page
from service.health import EXPERTS, LIVENESS
from service.node.agent import Agent
from service.node.calls import MAX_UNOPENED, ExpertCalls, NodeCalls, add_expert_calls
from service.node.config import NodeConfig
from service.node.metrics import NodeMetrics
from service.printable import counted
from service.server import channel_options

log = logging.getLogger("colibri.node")
_QUIET = 2.0  # seconds without a batch after which a draining node leaves though streams are open
_LOOK_EVERY = 0.05
_CHECK_EVERY = 1.0  # seconds between two looks for idle streams, and at the model's file
_FAREWELL = 1.0  # seconds for the last answers to reach their callers
_SPARE_THREADS = 8  # for calls other than streams and, for each, one that waits for news
_SERVICES = (
    node_pb2.DESCRIPTOR.services_by_name["Node"].full_name,
    experts_pb2.DESCRIPTOR.services_by_name["Experts"].full_name,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    reflection.SERVICE_NAME,
)


class NodeServer:
    """One node behind one address. `run()` is its whole life."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.port = 0  # bound
        self._signals = -1  # descriptor: a byte for each signal

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT and drains. Raises ConfigError, or what the engine and workers raise, if it cannot start."""
        with contextlib.ExitStack() as undo, self._signals_caught():
            _check_addresses(self.config)
            agent = Agent(self.config)
            undo.callback(agent.close)
            metrics = NodeMetrics()
            calls = ExpertCalls(agent, metrics)
            self._show(metrics, agent, calls, undo)
            threads = 2 * self.config.max_streams + MAX_UNOPENED + _SPARE_THREADS
            pool = undo.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="node"))
            watchers = undo.enter_context(ThreadPoolExecutor(2, thread_name_prefix="health"))
            statuses = health.HealthServicer(experimental_non_blocking=True, experimental_thread_pool=watchers)
            server = grpc.server(pool, options=channel_options(self.config.max_message_bytes))
            # The stubs' types describe servicers of asyncio servers only.
            node_pb2_grpc.add_NodeServicer_to_server(NodeCalls(agent, calls.seats), server)  # type: ignore[arg-type]
            add_expert_calls(server, calls)
            health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
            reflection.enable_server_reflection(_SERVICES, server)
            self._bind(server)
            server.start()
            undo.callback(lambda: server.stop(_FAREWELL).wait())
            for service in (LIVENESS, EXPERTS):
                statuses.set(service, health_pb2.HealthCheckResponse.SERVING)
            log.info("node %s serves %s on %s:%d", self.config.own_name, agent.model_name, self.config.host, self.port)
            log.info("holds %s", agent.holding)
            self._serve(calls, agent)
            agent.news.tell(draining=True)
            statuses.set(EXPERTS, health_pb2.HealthCheckResponse.NOT_SERVING)
            self._drain(calls)
            agent.news.leave()

    def _serve(self, calls: ExpertCalls, agent: Agent) -> None:
        """Until it is told to leave. SegmentError if the model's file is no longer whole and is needed."""
        while not self._signalled(min(_CHECK_EVERY, self.config.idle_timeout / 4)):
            agent.check_file()
            try:
                calls.seats.end_idle()
            except Exception:
                log.exception("ending idle streams failed; it is tried again")

    def _drain(self, calls: ExpertCalls) -> None:
        log.info("draining %s, for %.0f s at the most", counted(calls.streams, "stream"), self.config.drain_grace)
        waited = 0.0
        while calls.streams and waited < self.config.drain_grace and not (waited >= _QUIET and calls.quiet_for >= _QUIET):
            if self._signalled(_LOOK_EVERY):
                return
            waited += _LOOK_EVERY

    def _bind(self, server: grpc.Server) -> None:
        config = self.config
        host = f"[{config.host.strip('[]')}]" if ":" in config.host else config.host
        address = f"{host}:{config.port}"
        try:
            if not config.secure:
                self.port = server.add_insecure_port(address)
                return
            pair = (read_pem("tls_key", config.tls_key), read_pem("tls_cert", config.tls_cert))
            authority = read_pem("tls_ca", config.tls_ca)
            credentials = grpc.ssl_server_credentials([pair], root_certificates=authority, require_client_auth=True)
            self.port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: it was free a moment ago; choose another port or host") from error

    def _show(self, metrics: NodeMetrics, agent: Agent, calls: ExpertCalls, undo: contextlib.ExitStack) -> None:
        metrics.watch("colibri_node_share_bytes", "Bytes of the experts and layers held.", lambda: agent.share_bytes)
        metrics.watch("colibri_node_streams", "Front ends connected.", lambda: calls.streams)
        metrics.watch("colibri_node_not_held_pairs", "Pairs computed of experts that were not held.", lambda: agent.not_held)
        metrics.watch("colibri_node_kv_blocks", "KV blocks there are.", lambda: agent.rooms.total)
        metrics.watch("colibri_node_kv_blocks_held", "KV blocks that front ends have.", lambda: agent.rooms.total - agent.rooms.free)
        metrics.watch("colibri_node_lanes", "Threads that compute.", lambda: agent.team.plan.lanes)
        if self.config.metrics_port is None:
            return
        where = f"{self.config.metrics_host}:{self.config.metrics_port}"
        try:
            page, _ = serve_page(metrics.registry, host=self.config.metrics_host, port=self.config.metrics_port)
        except OSError as error:
            raise ConfigError(f"metrics cannot be served on {where}: {error.strerror or error}; choose another metrics_port") from error
        undo.callback(page.server_close)
        undo.callback(page.shutdown)

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """SIGTERM and SIGINT are bytes in a pipe; as they were afterwards. Whichever thread the kernel chooses, and whatever it does, the
        pipe has the byte at once."""
        self._signals, told = os.pipe()
        os.set_blocking(told, False)
        former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        before = signal.set_wakeup_fd(told)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in former.items():
                signal.signal(number, handler)
            os.close(told)
            os.close(self._signals)

    def _signalled(self, seconds: float | None) -> bool:
        """Waits for the next signal, so long at the most (None: for ever); whether it came."""
        came, _, _ = select.select([self._signals], [], [], seconds)
        return bool(came and os.read(self._signals, 1))


def _check_addresses(config: NodeConfig) -> None:
    """Before the model is loaded: where to listen, and the certificates for it. Raises ConfigError."""
    check_port(config.host, config.port, f"cannot listen on {config.host}:{config.port}", "choose another port or host")
    if config.metrics_port is not None:
        where = f"metrics cannot be served on {config.metrics_host}:{config.metrics_port}"
        if config.port and (config.host, config.port) == (config.metrics_host, config.metrics_port):
            raise ConfigError(f"{where}: front ends are to be served there; choose another metrics_port")
        check_port(config.metrics_host, config.metrics_port, where, "choose another metrics_port")
    if config.secure:
        check_pair(config, "tls_cert", "tls_key", "tls_ca")
