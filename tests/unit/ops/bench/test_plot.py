"""Curves from reports, and the files drawn of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench.limits import MachineLimits
from ops.bench.measure import BenchError, Machine, Report, Row
from ops.bench.peers.table import markdown
from ops.bench.plot import curves, draw, read_report


def report(model: str, *rows: Row) -> str:
    machine = Machine(cpu="Test CPU", cores=2, memory_gib=24.0, kernel="6.1", isa="avx2", commit="abc")
    return Report("peers", model, machine, rows, MachineLimits(2, 70.0, 40.0)).as_json()


PEERS = report(
    "mm int4",
    Row("prefill 512", "tokens/s", (9.0,)),
    Row("decode, 8 streams", "tokens/s", (80.0, 90.0, 70.0), {"streams": 8}),
    Row("decode, 1 stream", "tokens/s", (20.0,), {"streams": 1}),
    Row("decode, 1 stream", "tokens/s", (10.0,), {"streams": 1}, engine="llama.cpp Q4_0"),
    Row("decode behind 4096", "tokens/s", (1.0,), {"streams": 1}),
)


def test_curves_go_by_model_engine_and_streams() -> None:
    ours, theirs = curves([json.loads(PEERS)])
    assert (ours.engine, ours.model) == ("colibri", "mm int4")
    assert ours.points == ((1, 20.0, 20.0, 20.0), (8, 80.0, 70.0, 90.0))
    assert (theirs.engine, theirs.points) == ("llama.cpp Q4_0", ((1, 10.0, 10.0, 10.0),))


def test_reports_without_streams_cannot_be_drawn() -> None:
    with pytest.raises(BenchError, match="number of streams"):
        curves([json.loads(report("m", Row("prefill 512", "tokens/s", (9.0,))))])


@pytest.mark.parametrize("text", ["no json", "[]", "{}"])
def test_files_that_are_no_reports_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"x\.json"):
        read_report(path)


def test_png_and_svg_are_written(tmp_path: Path) -> None:
    other = report("qm int4", Row("gRPC, 4 streams", "tokens/s", (5.0,), {"streams": 4}))
    reports = [json.loads(PEERS), json.loads(other)]
    png, svg = draw(reports, tmp_path / "bench")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"colibri gRPC" in svg.read_bytes()
    assert max(png.stat().st_size, svg.stat().st_size) < 200_000


def test_a_table_has_a_line_a_case_with_the_ratio_to_the_best_peer() -> None:
    peers = json.loads(PEERS)
    peers["rows"] = [row for row in peers["rows"] if row["case"] == "decode, 1 stream"]
    _heading, _rule, line = markdown([peers])
    assert line == "| mm int4, decode, 1 stream | 20 (±0%) | 10 (±0%) llama.cpp Q4_0 | 2.00 |  |  |"
    peers["rows"] = peers["rows"][1:]
    with pytest.raises(BenchError, match="no row of ours"):
        list(markdown([peers]))
