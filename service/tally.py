"""A histogram of what is observed for every token. prometheus_client's own takes locks for each and cannot take several at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import inf, isinf

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally:
    """What was observed of one model. One thread observes, any may read."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of one value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def page(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulated buckets and the sum, as Prometheus wants them."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if isinf(bound) else str(bound), float(total)))
        return buckets, self._sum


class Tallies(Collector):
    """One for each model."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], *, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._tallies: dict[str, Tally] = {}
        registry.register(self)

    def labels(self, model: str) -> Tally:
        """That of one model."""
        return self._tallies.setdefault(model, Tally(self._bounds))

    def remove(self, model: str) -> None:
        """The model is gone."""
        self._tallies.pop(model, None)

    def collect(self) -> Iterator[Metric]:
        """Everything, for a scrape."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        for model, tally in list(self._tallies.items()):
            buckets, total = tally.page()
            family.add_metric([model], buckets, total)
        yield family
