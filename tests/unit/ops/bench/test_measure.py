"""Statistics, the JSON object and the table of a report."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from ops.bench.limits import MachineLimits
from ops.bench.measure import Machine, Report, Row, describe_machine, figure, percentile

MACHINE = Machine(cpu="Test CPU", cores=2, memory_gib=24.0, kernel="6.1", isa="avx2", commit="abc")
LIMITS = MachineLimits(lanes=2, read_gb_s=70.0, read_one_gb_s=40.0, peak_gops={"int8": 1000.0})


def test_a_row_knows_median_spread_and_share() -> None:
    row = Row("decode 1", "tokens/s", (90.0, 110.0, 100.0), limit=200.0)
    assert (row.median, row.spread, row.share) == (100.0, 0.2, 0.5)
    assert Row("decode 1", "tokens/s", (1.0,)).share is None


def test_a_row_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="decode 1: nothing"):
        Row("decode 1", "tokens/s", ())


def test_percentiles_are_samples_that_occurred() -> None:
    thousand = [float(i) for i in range(1000, 0, -1)]
    assert percentile(thousand, 0.5) == 500.0
    assert percentile(thousand, 0.99) == 990.0
    assert percentile(thousand, 1.0) == 1000.0
    assert percentile([3.0], 0.99) == 3.0


def test_json_has_machine_commit_limits_samples_median_and_share() -> None:
    report = Report("decode", "mm.colibri", MACHINE, (Row("decode 1", "tokens/s", (1.0, 3.0), {"streams": 1}, limit=4.0),), LIMITS)
    read = json.loads(report.as_json())
    assert read["machine"] == {"cpu": "Test CPU", "cores": 2, "memory_gib": 24.0, "kernel": "6.1", "isa": "avx2", "commit": "abc"}
    assert read["limits"]["read_gb_s"] == 70.0
    assert read["limits"]["peak_gops"] == {"int8": 1000.0}
    (row,) = read["rows"]
    assert row == {
        "case": "decode 1",
        "unit": "tokens/s",
        "samples": [1.0, 3.0],
        "details": {"streams": 1},
        "limit": 4.0,
        "engine": "colibri",
        "median": 2.0,
        "spread": 1.0,
        "share": 0.5,
    }


def test_the_table_names_the_machine_and_leaves_out_empty_columns() -> None:
    rows = (Row("a", "us", (1.0,), {"wait": 0.5}), Row("b", "us", (2.0,), engine="torch"))
    console = Console(width=200, file=io.StringIO())
    console.print(Report("ipc", "mm.colibri", MACHINE, rows, LIMITS, notes=("a note",)).shown())
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "Test CPU, 2 cores" in text
    assert "plain read 40.0 GB/s on one core, 70.0 on all of 2" in text
    assert "a note" in text
    assert "torch" in text
    assert "of limit" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.0312, "0.0312"), (12.345, "12.3"), (99.99, "100"), (1234.5, "1234"), (0.00012, "0.0001")]
)
def test_figures_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert figure(value) == text


def test_this_machine_can_be_described() -> None:
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert machine.isa in ("generic", "avx2", "avx512", "neon")
