"""Prometheus metrics: the names that existing dashboards read (vllm:*), and the engine's own (colibri_*)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_c import OPERATIONS
from service.engine import EngineTotals
from service.exposition import serve_page
from service.load_metrics import load_families
from service.load_watch import LoadWatch
from service.plan import SchedulerStats
from service.tally import Tallies

if TYPE_CHECKING:
    from service.nodes.nodes import Nodes

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is read when Prometheus asks."""

    scheduler: SchedulerStats
    engine: EngineTotals
    workers_ready: int
    workers_wanted: int
    worker_restarts: int
    loads: LoadWatch
    nodes: Nodes | None = None


class Metrics:
    """All metrics of a server, labelled by model. Observed from the loop, scraped from the HTTP server's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._http: tuple[HTTPServer, Thread] | None = None

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=self.registry, buckets=_SECONDS)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens taken in.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.successes = counter("vllm:request_success", "Requests answered, by how they ended.", "finished_reason")
        self.failures = counter("colibri_requests_failed", "Requests that ended with a status other than OK.", "code")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From acceptance to the first token.")
        text = "Between tokens of one answer."
        self.inter_token = Tallies("vllm:inter_token_latency_seconds", text, _TOKEN_SECONDS, registry=self.registry)
        self.end_to_end = histogram("vllm:e2e_request_latency_seconds", "From acceptance to the end.")
        self.queue_time = histogram("vllm:request_queue_time_seconds", "From acceptance to the first step.")

    def model(self, name: str) -> ModelMetrics:
        """Those of one model."""
        return ModelMetrics(self, name)

    @property
    def port(self) -> int | None:
        """Of the HTTP server, if it runs."""
        return None if self._http is None else self._http[0].server_port

    def read_from(self, snapshots: Callable[[], Mapping[str, Snapshot]], *, experts: bool = False) -> None:
        """Where the gauges and engine counters of each model come from. `experts`: with a counter for every single expert."""
        self.registry.register(_EngineCollector(snapshots, experts=experts))

    def serve(self, host: str, port: int) -> None:
        """Starts the HTTP server. Raises OSError if the address cannot be had."""
        self._http = serve_page(self.registry, host=host, port=port)

    def close(self) -> None:
        """Stops the HTTP server."""
        if self._http is not None:
            server, thread = self._http
            server.shutdown()
            server.server_close()
            thread.join()
            self._http = None


class ModelMetrics:
    """What is observed of one model."""

    def __init__(self, shared: Metrics, model: str) -> None:
        self._shared = shared
        self._model = model
        self._reasons: set[str] = set()
        self._codes: set[str] = set()
        self._prompt_tokens = shared.prompt_tokens.labels(model)
        self._generation_tokens = shared.generation_tokens.labels(model)
        self.first_token = shared.first_token.labels(model)
        self.inter_token = shared.inter_token.labels(model)
        self.end_to_end = shared.end_to_end.labels(model)
        self.queue_time = shared.queue_time.labels(model)

    def count_tokens(self, *, prompt: int, generated: int) -> None:
        """Tokens of a request that has ended."""
        self._prompt_tokens.inc(prompt)
        self._generation_tokens.inc(generated)

    def count_success(self, reason: str) -> None:
        """A request answered."""
        self._reasons.add(reason)
        self._shared.successes.labels(self._model, reason).inc()

    def count_failure(self, code: str) -> None:
        """A request refused or broken off with this status code."""
        self._codes.add(code)
        self._shared.failures.labels(self._model, code).inc()

    def forget(self) -> None:
        """The model is gone; a page scraped from now on does not have it."""
        shared = self._shared
        for metric in (shared.first_token, shared.end_to_end, shared.queue_time):
            metric.remove(self._model)
        shared.inter_token.remove(self._model)
        for counter in (shared.prompt_tokens, shared.generation_tokens):
            counter.remove(self._model)
        for reason in self._reasons:
            shared.successes.remove(self._model, reason)
        for code in self._codes:
            shared.failures.remove(self._model, code)


class _EngineCollector(Collector):
    def __init__(self, snapshots: Callable[[], Mapping[str, Snapshot]], *, experts: bool) -> None:
        self._snapshots = snapshots
        self._experts = experts

    def describe(self) -> list[Metric]:
        return []  # nothing is collected at registration, when the engine may not yet run

    def collect(self) -> Iterator[Metric]:
        snapshots = self._snapshots()
        yield from _families(GaugeMetricFamily, {model: _gauges(snapshot) for model, snapshot in snapshots.items()})
        yield from load_families({model: snapshot.loads for model, snapshot in snapshots.items()}, experts=self._experts)
        if nodes := {model: snapshot.nodes for model, snapshot in snapshots.items() if snapshot.nodes is not None}:
            from service.nodes.metrics import node_families  # here: most servers have no nodes, and start without what they need

            yield from node_families(nodes)
        text = "Time in each operation's phases, by the front end's clock."
        operations = CounterMetricFamily("colibri_operation_seconds", text, labels=["model_name", "operation"])
        for model, snapshot in snapshots.items():
            for name, spent in zip(OPERATIONS, snapshot.engine.op_ns, strict=False):
                operations.add_metric([model, name], spent / 1e9)
        yield operations
        yield from _families(CounterMetricFamily, {model: _counters(snapshot) for model, snapshot in snapshots.items()})


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], rows: Mapping[str, list[tuple[str, str, float]]]
) -> list[GaugeMetricFamily | CounterMetricFamily]:
    """A family for each name, with a sample for each model; every model has the same names."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for model, values in rows.items():
        for name, text, value in values:
            families.setdefault(name, kind(name, text, labels=["model_name"])).add_metric([model], value)
    return list(families.values())


def _gauges(snapshot: Snapshot) -> list[tuple[str, str, float]]:
    scheduler, pool = snapshot.scheduler, snapshot.scheduler.pool
    return [
        ("vllm:num_requests_running", "Requests that hold KV memory.", scheduler.running),
        ("vllm:num_requests_waiting", "Requests in the queue.", scheduler.waiting),
        ("vllm:kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1.", pool.held / pool.total),
        ("colibri_queue_tokens", "Prompt tokens in the queue.", scheduler.waiting_tokens),
        ("colibri_prefill_rows_per_second", "Moving average; 0 while unknown.", scheduler.prefill_rate),
        ("colibri_kv_blocks", "KV blocks there are.", pool.total),
        ("colibri_kv_blocks_cached", "KV blocks nobody holds that may be reused.", pool.cached),
        ("colibri_lanes", "Lanes of the last step.", snapshot.engine.lanes),
        ("colibri_workers_ready", "Worker processes that compute.", snapshot.workers_ready),
        ("colibri_workers_wanted", "Worker processes there should be.", snapshot.workers_wanted),
    ]


def _counters(snapshot: Snapshot) -> list[tuple[str, str, float]]:
    engine, pool = snapshot.engine, snapshot.scheduler.pool
    return [
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", pool.queried_tokens),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", pool.hit_tokens),
        ("colibri_preemptions", "Requests that gave their KV memory back to be recomputed.", snapshot.scheduler.preemptions),
        ("colibri_rerouted_pairs", "Pairs of a token and a layer that damping gave other experts.", snapshot.scheduler.rerouted_pairs),
        ("colibri_damped_pairs", "Pairs of a token and a layer that were routed with damping.", snapshot.scheduler.damped_pairs),
        ("colibri_steps", "Steps done.", engine.steps),
        ("colibri_steps_failed", "Steps that could not be done.", engine.failed_steps),
        ("colibri_rows", "Tokens that went through the model.", engine.rows),
        ("colibri_step_seconds", "Time in steps.", engine.step_ns / 1e9),
        ("colibri_step_wait_seconds", "Time in steps that the front end waited.", engine.wait_ns / 1e9),
        ("colibri_step_serial_seconds", "Time in steps that only the front end worked.", engine.serial_ns / 1e9),
        ("colibri_phases", "Phases of all steps.", engine.phases),
        ("colibri_tasks", "Tasks done.", engine.tasks),
        ("colibri_tasks_rerun", "Tasks taken over from a lane that died.", engine.tasks_rerun),
        ("colibri_tasks_homed", "Tasks whose weights lie on a NUMA node of their own.", engine.tasks_homed),
        ("colibri_tasks_local", "Of these, the ones done by a lane of that node.", engine.tasks_local),
        ("colibri_lanes_lost", "Lanes found dead in a step.", engine.lanes_lost),
        ("colibri_worker_restarts", "Worker processes started again.", snapshot.worker_restarts),
    ]
