"""Samples, the machine they were taken on, and how a result is shown."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Machine:
    """What a figure depends on besides the code."""

    cpu: str
    cores: int  # CPUs this process may use
    memory_gib: float
    isa: str
    commit: str


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case. Samples are in `unit`, in the order taken."""

    case: str
    unit: str
    samples: tuple[float, ...]
    details: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (max(self.samples) - min(self.samples)) / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """One run of one bench on one model."""

    bench: str
    model: str
    machine: Machine
    rows: tuple[Row, ...]
    read_gb_s: float  # plain read of all cores, taken in the same run

    def as_json(self) -> str:
        """One JSON object."""
        rows = [asdict(row) | {"median": row.median, "spread": row.spread} for row in self.rows]
        return json.dumps(asdict(self) | {"rows": rows})

    def table(self) -> Table:
        """For people."""
        from rich import box
        from rich.table import Table

        machine = self.machine
        where = f"{machine.cpu}, {machine.cores} cores, {machine.isa}, plain read {self.read_gb_s:.1f} GB/s, commit {machine.commit}"
        table = Table(title=f"{self.bench}: {self.model}", caption=where, box=box.SIMPLE_HEAD)
        details = list(dict.fromkeys(name for row in self.rows for name in row.details))
        for heading in ("case", "median", "unit", "spread", *details):
            table.add_column(heading, justify="left" if heading in ("case", "unit") else "right")
        for row in self.rows:
            extra = [f"{row.details[name]:.3g}" if name in row.details else "" for name in details]
            table.add_row(row.case, f"{row.median:.1f}", row.unit, f"{row.spread:.0%}", *extra)
        return table


def describe_machine() -> Machine:
    """This machine, the selected instruction set and the checked-out commit ('' outside a work tree)."""
    import engine_c

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(pages / 2**30, 1),
        isa=engine_c.isa_name(),
        commit=_commit(),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


def _commit() -> str:
    command: Sequence[str] = ("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
