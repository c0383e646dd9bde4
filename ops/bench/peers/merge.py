"""Reports of several runs in one file: a later run's rows take the place of an earlier one's of the same case and engine. Pure but for the
file. Ratios stay those of the run that measured them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ops.bench.plot import read_report

Report = Mapping[str, object]


def merge_into(path: Path, report: Report, *, when: str) -> None:
    """Writes the report into the file, keeping what the file has of other cases and engines. BenchError if it is no report."""
    merged = merge(read_report(path) if path.exists() else None, report, when=when)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def merge(old: Report | None, new: Report, *, when: str) -> Report:
    """`old` with the rows of `new`; each row's "run" is its place in "runs", which says when that run was and what its limits were."""
    runs = [*_list(old, "runs"), {"when": when, "limits": new["limits"], "machine": new["machine"]}]
    rows = {_key(row): row for row in _list(old, "rows")}
    rows |= {_key(row): {**row, "run": len(runs) - 1} for row in _list(new, "rows")}
    return {**new, "rows": list(rows.values()), "runs": runs}


def _list(report: Report | None, name: str) -> list[dict[str, object]]:
    found = report.get(name, []) if report else []
    assert isinstance(found, list)
    return found


def _key(row: Mapping[str, object]) -> tuple[object, object]:
    return row["case"], row["engine"]
