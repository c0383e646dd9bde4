"""Nodes as Prometheus sees them: colibri_node_*, by the model and the node's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from service.nodes.lifecycle import State
from service.nodes.member import Member
from service.nodes.nodes import Nodes

_LABELS = ["model_name", "node"]


def node_families(nodes: Mapping[str, Nodes]) -> Iterator[Metric]:
    """Of all models that have nodes."""
    ready = GaugeMetricFamily("colibri_node_ready", "Whether a node computes for us, 1 or 0.", labels=_LABELS)
    held = GaugeMetricFamily("colibri_node_experts", "Experts a node holds, over all layers.", labels=_LABELS)
    layers = GaugeMetricFamily("colibri_node_layers", "Layers a node runs whole.", labels=_LABELS)
    held_bytes = GaugeMetricFamily("colibri_node_held_bytes", "Bytes of the experts a node holds.", labels=_LABELS)
    rate = GaugeMetricFamily("colibri_node_pairs_per_second", "Pairs a node computed a second, in the last minute.", labels=_LABELS)
    counters = {name: CounterMetricFamily(f"colibri_node_{name}", text, labels=_LABELS) for name, text in _COUNTERS.items()}
    for model, theirs in nodes.items():
        for member in theirs.members:
            labels = [model, member.name]
            ready.add_metric(labels, member.life.state is State.READY)
            held.add_metric(labels, len(member.held))
            layers.add_metric(labels, sum(end - first for first, end in member.ranges))
            held_bytes.add_metric(labels, member.description.share_bytes)
            rate.add_metric(labels, member.record.rate)
            for name, value in _values(member).items():
                counters[name].add_metric(labels, value)
    yield ready
    yield from (held, layers, held_bytes, rate)
    yield from counters.values()
    yield from _totals(nodes)


_COUNTERS = {
    "batches": "Batches answered.",
    "pairs": "Pairs of a row and an expert computed.",
    "hops": "Batches of rows run through layers.",
    "hop_rows": "Rows of them, each as often as there were layers.",
    "hop_seconds": "Time from sending these to their answers.",
    "sent_bytes": "Bytes of rows sent.",
    "received_bytes": "Bytes of outputs received.",
    "round_trip_seconds": "Time from sending batches to their answers.",
    "compute_seconds": "Time nodes computed, by their own clock.",
    "hedges": "Batches that were asked of another node too.",
    "failures": "Batches not answered in time or not rightly.",
    "losses": "Times a node was lost after it had computed.",
}


def _values(member: Member) -> dict[str, float]:
    record = member.record
    return {
        "batches": record.batches,
        "pairs": record.pairs,
        "hops": record.hops,
        "hop_rows": record.hop_rows,
        "hop_seconds": record.hop_s,
        "sent_bytes": record.sent_bytes,
        "received_bytes": record.received_bytes,
        "round_trip_seconds": record.round_trip_s,
        "compute_seconds": record.compute_s,
        "hedges": record.hedges,
        "failures": record.failures,
        "losses": member.life.losses,
    }


def _totals(nodes: Mapping[str, Nodes]) -> Iterator[Metric]:
    fallback = CounterMetricFamily("colibri_node_fallback_pairs", "Pairs computed here, no node being there.", labels=["model_name"])
    wait = CounterMetricFamily("colibri_node_wait_seconds", "Time steps waited for nodes with nothing else to do.", labels=["model_name"])
    dropped = CounterMetricFamily("colibri_node_dropped_answers", "Answers that came when nobody waited any more.", labels=["model_name"])
    for model, theirs in nodes.items():
        totals = theirs.remote.totals
        fallback.add_metric([model], totals.fallback_pairs)
        wait.add_metric([model], totals.wait_s + theirs.remote.hops.wait_s)
        dropped.add_metric([model], totals.dropped + theirs.remote.hops.dropped)
    moves = CounterMetricFamily(
        "colibri_node_moves", "Experts moved, copied, or given up as copies, to even loads out.", labels=["model_name"]
    )
    ratio = GaugeMetricFamily(
        "colibri_nodes_max_over_mean",
        "Load of the node with most over the mean, by shares and loads when last looked at.",
        labels=["model_name"],
    )
    for model, theirs in nodes.items():
        moves.add_metric([model], theirs.balancer.moved)
        ratio.add_metric([model], theirs.balancer.ratio)
    yield from (fallback, wait, dropped, moves, ratio)
