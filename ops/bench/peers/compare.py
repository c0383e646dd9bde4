"""Samples of several engines, taken in turn, put together: medians and ratios. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ops.bench.measure import OURS, Row


@dataclass(slots=True)
class Samples:
    """What one engine did in one case, a sample a round."""

    values: list[float] = field(default_factory=list)
    details: dict[str, list[float]] = field(default_factory=dict)

    def add(self, value: float, details: Mapping[str, float] | None = None) -> None:
        """One round's."""
        self.values.append(value)
        for name, detail in (details or {}).items():
            self.details.setdefault(name, []).append(detail)


class Board:
    """Samples by case and engine, in the order they first came."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], Samples] = {}

    def add(self, case: str, engine: str, value: float, details: Mapping[str, float] | None = None) -> None:
        """A sample in tokens/s."""
        self._samples.setdefault((case, engine), Samples()).add(value, details)

    def rows(self) -> list[Row]:
        """Case by case; each peer's row says how many times as fast ours is, ours how many times as fast as the best peer."""
        cases = list(dict.fromkeys(case for case, _ in self._samples))
        return [row for case in cases for row in with_ratios(self._rows_of(case))]

    def _rows_of(self, case: str) -> list[Row]:
        rows = []
        for (name, engine), samples in self._samples.items():
            if name == case:
                details = {key: sum(values) / len(values) for key, values in samples.details.items()}
                rows.append(Row(case, "tokens/s", tuple(samples.values), details, engine=engine))
        return rows


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one case with "colibri is" in the peers' details and "of best peer" in ours."""
    ours = next((row for row in rows if row.engine == OURS), None)
    peers = [row for row in rows if not row.engine.startswith(OURS)]
    if ours is not None:
        for row in peers:
            row.details["colibri x"] = ours.median / row.median
    if peers:
        best = max(row.median for row in peers)
        for row in rows:
            if row.engine.startswith(OURS):
                row.details["x best peer"] = row.median / best
    return list(rows)
