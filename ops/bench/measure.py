"""Samples, the machine they were taken on, and how a result is shown."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ops.bench.limits import MachineLimits

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

OURS = "colibri"


class BenchError(Exception):
    """Something cannot be measured; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a figure depends on besides the code."""

    cpu: str
    cores: int  # CPUs this process may use
    memory_gib: float
    kernel: str
    isa: str
    commit: str


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case. Samples are in `unit`, in the order taken; `limit` is what the machine could do at most, in the same unit."""

    case: str
    unit: str
    samples: tuple[float, ...]
    details: dict[str, float] = field(default_factory=dict)
    limit: float | None = None
    engine: str = OURS

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"{self.case}: nothing was measured")

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (max(self.samples) - min(self.samples)) / self.median if self.median else 0.0

    @property
    def share(self) -> float | None:
        """The median's share of the limit."""
        return self.median / self.limit if self.limit else None

    def as_dict(self) -> dict[str, object]:
        """What goes into JSON."""
        return asdict(self) | {"median": self.median, "spread": self.spread, "share": self.share}


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that `share` (0 to 1) of all are not above."""
    ordered = sorted(samples)
    rank = max(0, -(-round(share * len(ordered) * 1e6) // 1_000_000) - 1)
    return ordered[min(rank, len(ordered) - 1)]


@dataclass(frozen=True, slots=True)
class Report:
    """One run of one bench on one model."""

    bench: str
    model: str
    machine: Machine
    rows: tuple[Row, ...]
    limits: MachineLimits  # taken in the same run
    limit_is: str = "of limit"  # heading of the share
    notes: tuple[str, ...] = ()

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self) | {"rows": [row.as_dict() for row in self.rows]})

    def shown(self) -> Group:
        """For people: a table, and below it where it was measured."""
        from rich.console import Group

        return Group(self._table(), self._where(), *self.notes)

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        engines = {row.engine for row in self.rows} != {OURS}
        shares = any(row.limit for row in self.rows)
        details = list(dict.fromkeys(name for row in self.rows for name in row.details))
        table = Table(title=f"{self.bench}: {self.model}", box=box.SIMPLE_HEAD, title_justify="left")
        headings = ["case", *(["engine"] if engines else []), "median", "unit", "spread", *([self.limit_is] if shares else []), *details]
        for heading in headings:
            table.add_column(heading, justify="left" if heading in ("case", "engine", "unit") else "right")
        for row in self.rows:
            cells = [row.case, *([row.engine] if engines else []), figure(row.median), row.unit, f"{row.spread:.0%}"]
            cells += [f"{row.share:.0%}" if row.share is not None else ""] if shares else []
            table.add_row(*cells, *(figure(row.details[name]) if name in row.details else "" for name in details))
        return table

    def _where(self) -> str:
        machine, limits = self.machine, self.limits
        peaks = ", ".join(f"{name} {gops:.0f} GOP/s" for name, gops in limits.peak_gops.items())
        return (
            f"{machine.cpu}, {machine.cores} cores, Linux {machine.kernel}, {machine.isa}, commit {machine.commit or 'unknown'}\n"
            f"plain read {limits.read_one_gb_s:.1f} GB/s on one core, {limits.read_gb_s:.1f} on all of {limits.lanes}"
            + (f"; peak {peaks}" if peaks else "")
        )


def figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value and abs(value) < 100:
        return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
    return f"{value:.0f}"


def describe_machine() -> Machine:
    """This machine, the selected instruction set and the checked-out commit ('' outside a work tree)."""
    import engine_c

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(pages / 2**30, 1),
        kernel=platform.release(),
        isa=engine_c.isa_name(),
        commit=_commit(),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    command: Sequence[str] = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
