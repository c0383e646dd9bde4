"""What a node tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class NodeMetrics:
    """colibri_node_*, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._batches = Counter("colibri_node_batches", "Batches computed.", registry=registry)
        self._pairs = Counter("colibri_node_pairs", "(row, expert) pairs computed.", registry=registry)
        self._hops = Counter("colibri_node_hops", "Batches of rows run through layers.", registry=registry)
        self._rows = Counter("colibri_node_hop_rows", "Rows run through layers.", registry=registry)
        self._compute = Counter("colibri_node_compute_seconds", "Time spent computing batches.", registry=registry)
        self._queue = Counter("colibri_node_queue_seconds", "Time batches waited for others.", registry=registry)
        self._failures = Counter("colibri_node_failures", "Batches refused or failed, by status code.", ["code"], registry=registry)

    def pairs(self, count: int) -> None:
        """Counts what a batch of experts was of."""
        self._pairs.inc(count)

    def hop(self, *, rows: int) -> None:
        """Counts a batch of layers."""
        self._hops.inc()
        self._rows.inc(rows)

    def computed(self, *, seconds: float, waited: float) -> None:
        """Counts a batch of either kind."""
        self._batches.inc()
        self._compute.inc(seconds)
        self._queue.inc(waited)

    def failed(self, code: str) -> None:
        """Counts a batch that has no result."""
        self._failures.labels(code).inc()

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(name, help_text, registry=self.registry).set_function(read)
