"""The reports of `colibri bench balance-speed --json`, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ops.bench.balance_speed import OFF
from ops.bench.measure import BenchError

__all__ = ["OFF", "SpeedReport", "SpeedRow", "read_speed"]


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One policy's speed on one model; `setting` OFF is none."""

    setting: str
    tokens_s: float
    ratio: float  # against none, median over rounds, and its quartiles
    low: float
    high: float
    router_us: float
    router_cost: float  # per cent of a step
    active: float


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """One run."""

    model: str
    machine: str
    rows: tuple[SpeedRow, ...]


def read_speed(path: Path) -> SpeedReport:
    """BenchError."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        machine = whole["machine"]
        where = f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, commit {machine['commit'] or 'unknown'}"
        rows = [(row["case"], row["median"], row["details"]) for row in whole["rows"]]
        return SpeedReport(whole["model"], where, tuple(_row(case, median, details) for case, median, details in rows))
    except (ValueError, KeyError, TypeError) as cause:
        raise BenchError(f"{path} is no report of `colibri bench balance-speed --json` ({cause})") from cause


def _row(case: str, median: float, details: dict[str, float]) -> SpeedRow:
    ratio = details["x off"], details["from"], details["to"]
    return SpeedRow(case, median, *ratio, details["router us"], details["router +%"], details["active"])
