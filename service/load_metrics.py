"""How experts are used, for Prometheus. The number of series is bounded by a model's layers: 22 each, and some; what single experts had is
told only if asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from service.load import Counters, Load
from service.load_watch import LoadWatch

_GAUGES = (  # of each layer and window
    ("colibri_expert_load_max_over_mean", "Tokens of a layer's busiest expert over the mean.", "max_over_mean"),
    ("colibri_expert_queue_variance", "Variance of the tokens that experts get in a step, the mean over steps.", "queue_variance"),
    ("colibri_expert_queue_longest", "Tokens of the expert with most in a step, the mean over steps.", "longest_mean"),
    ("colibri_experts_active", "Experts of a layer that have a token in a step, the mean over steps.", "active_mean"),
    ("colibri_rerouted_share", "Share of a layer's tokens whose experts damping changed.", "rerouted_share"),
    ("colibri_repeat_share", "Share of a layer's tokens with the same first expert as the token before.", "repeat_share"),
)
_RUN_TEXT = "Runs of tokens of a sequence with the same first expert, by their least length; of all layers."


def load_families(models: Mapping[str, LoadWatch], *, experts: bool) -> Iterator[Metric]:
    """Everything of all models; `experts`: with a counter for every expert of every layer."""
    windows = {model: [(f"{span:g}s", load) for span, load in watch.windows()] for model, watch in models.items()}
    for name, text, figure in _GAUGES:
        yield _gauge(name, text, figure, windows)
    yield _node_bytes(models, windows)
    counters = {model: found for model, watch in models.items() if (found := watch.counters) is not None}
    longest = GaugeMetricFamily("colibri_expert_queue_max", "Most tokens an expert got in a step so far.", labels=["model_name", "layer"])
    routed = CounterMetricFamily("colibri_routed_tokens", "Tokens of all experts of a layer.", labels=["model_name", "layer"])
    for model, found in counters.items():
        _by_layer(longest, model, found.queue_max.tolist())
        _by_layer(routed, model, found.tokens.sum(axis=1).tolist())
    yield from (longest, routed, _runs(counters))
    if experts:
        yield _experts(counters)


def _gauge(name: str, text: str, figure: str, windows: Mapping[str, Sequence[tuple[str, Load]]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["model_name", "layer", "window"])
    for model, theirs in windows.items():
        for window, load in theirs:
            for layer, value in enumerate(getattr(load, figure).tolist()):
                family.add_metric([model, str(layer), window], value)
    return family


def _node_bytes(models: Mapping[str, LoadWatch], windows: Mapping[str, Sequence[tuple[str, Load]]]) -> Metric:
    text = "Bytes of experts' weights of a node that a step reads, the mean over steps."
    family = GaugeMetricFamily("colibri_expert_step_bytes", text, labels=["model_name", "node", "window"])
    for model, watch in models.items():
        parts = watch.parts()
        for window, load in windows[model]:
            for node, count in load.bytes_by_node(watch.expert_bytes, parts).items():
                family.add_metric([model, "" if node is None else str(node), window], count)
    return family


def _by_layer(family: GaugeMetricFamily | CounterMetricFamily, model: str, values: Sequence[float]) -> None:
    for layer, value in enumerate(values):
        family.add_metric([model, str(layer)], value)


def _runs(counters: Mapping[str, Counters]) -> Metric:
    family = CounterMetricFamily("colibri_expert_runs", _RUN_TEXT, labels=["model_name", "length"])
    for model, found in counters.items():
        for power, count in enumerate(found.runs.sum(axis=0).tolist()):
            family.add_metric([model, str(1 << power)], count)
    return family


def _experts(counters: Mapping[str, Counters]) -> Metric:
    family = CounterMetricFamily("colibri_expert_tokens", "Tokens each expert had.", labels=["model_name", "layer", "expert"])
    for model, found in counters.items():
        for layer, tokens in enumerate(found.tokens.tolist()):
            for expert, count in enumerate(tokens):
                family.add_metric([model, str(layer), str(expert)], count)
    return family
