"""`colibri bench` as a user runs it, on the tiny model and with few samples: every command ends well and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ops.bench.experts_nodes import Cores, share_cores
from ops.random_model import SHAPES, make_model

CLI = [sys.executable, "-m", "ops.cli", "bench"]
DEADLINE = 100.0


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=DEADLINE)


def report(*arguments: str | Path) -> dict[str, dict[str, object]]:
    """Rows by case of a run with --json; checks what every report has."""
    done = bench(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert read["machine"]["cores"] >= 1
    assert read["limits"]["read_gb_s"] > 0
    assert set(read["limits"]["peak_gops"]) == {"int8", "bf16", "f32"}
    assert all(row["samples"] and row["median"] >= 0 for row in read["rows"] if row["unit"] != "us/token")
    return {row["case"]: row for row in read["rows"]}


def test_a_model_of_a_shape_in_numbers_is_made_and_measured(tmp_path: Path) -> None:
    model = tmp_path / "m.colibri"
    made = bench("make-model", "--shape", "2,64,2,1,96,4,2,300", "--quant", "int4", "--head", "int4", model)
    assert made.returncode == 0, made.stderr
    rows = report("prefill", model, "--tokens", "8,24", "--samples", "1", "--workers-per-node", "0")
    assert list(rows) == ["prefill 8", "prefill 24"]
    assert bench("make-model", "--shape", "2,64", model, "--force").returncode == 2


def test_bandwidth_and_router_need_no_model() -> None:
    rows = report("bandwidth", "--samples", "1")
    assert rows["read, 1 core"]["median"]
    assert rows["generic int8, 1 core"]["unit"] == "GOP/s"
    rows = report("router", "--samples", "1")
    assert "top 2 of 8, 16 tokens" in rows
    assert "top 2 of 8, 16 tokens, gate of 1024 included" in rows


def test_batch_and_decode_are_held_against_the_limit_of_the_run(tiny_model: Path) -> None:
    rows = report("batch", tiny_model, "--streams", "1,4", "--prompt", "8", "--samples", "1")
    assert rows["decode 1"]["limit"]
    assert rows["decode 4"]["details"]["streams"] == 4  # type: ignore[index]
    assert rows["decode 4"]["details"]["read GB/s"] > 0  # type: ignore[index]


def test_latency_has_a_sample_a_token(tiny_model: Path) -> None:
    (row,) = report("latency", tiny_model, "--tokens", "50").values()
    assert len(row["samples"]) == 50  # type: ignore[arg-type]
    assert row["details"]["p50"] <= row["details"]["p99"] <= row["details"]["most"]  # type: ignore[index]
    refused = bench("latency", tiny_model, "--tokens", "1000")
    assert refused.returncode == 1
    assert "do not fit the model's context" in refused.stderr


def test_ipc_tells_an_empty_phase_from_a_real_one(tiny_model: Path) -> None:
    rows = report("ipc", tiny_model, "--streams", "2", "--samples", "1", "--workers-per-node", "1", "--threads-per-worker", "1")
    assert list(rows) == ["empty phase, front end alone", "empty phase, whole team", "phase, 2 streams"]
    assert rows["empty phase, whole team"]["details"]["lanes"] == 2  # type: ignore[index]


def test_serve_is_held_against_the_engine_and_adds_up(tmp_path: Path) -> None:
    model = tmp_path / "long.colibri"  # answers that outlast everything a busy machine does between two looks at the server
    make_model(model, replace(SHAPES["tiny"], max_context=1 << 13), quant="int8", seed=1)
    options = ["--streams", "2", "--prompt", "8", "--answer", "4000", "--clients", "2", "--samples", "2"]
    rows = report("serve", model, *options, "--workers-per-node", "1", "--threads-per-worker", "1")
    served, engine = rows["gRPC, 2 streams"], rows["engine, 2 streams"]
    assert rows["gRPC, 2 streams, each token at once"]["details"]["tokens/message"] >= 1  # type: ignore[index]
    assert served["limit"] == engine["median"]
    walls = [row["details"]["of token"] for case, row in rows.items() if "wall:" in case]  # type: ignore[index]
    assert sum(walls) == pytest.approx(1)
    assert rows["  CPU: engine"]["median"] > 0  # type: ignore[operator]


def test_startup_and_memory_start_real_servers(tiny_model: Path) -> None:
    rows = report("startup", tiny_model, "--samples", "1", "--workers-per-node", "1", "--threads-per-worker", "1")
    ready, first = rows["serve: process to SERVING"]["median"], rows["serve: process to the first token"]["median"]
    assert 0 < ready < first  # type: ignore[operator]
    rows = report("memory", tiny_model, "--workers", "1", "--kv-memory", "4MiB")
    whole = rows["1 workers: all"]
    assert whole["details"]["weights"] * (1 << 20) == pytest.approx(tiny_model.stat().st_size, rel=0.35)  # type: ignore[index]


def test_a_report_is_drawn_and_a_table_names_the_machine(tiny_model: Path, tmp_path: Path) -> None:
    done = bench("batch", tiny_model, "--streams", "1,2", "--samples", "1", "--json")
    (tmp_path / "batch.json").write_text(done.stdout)
    drawn = bench("plot", tmp_path / "batch.json", "--out", tmp_path / "plot")
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "plot.png").is_file()
    assert (tmp_path / "plot.svg").is_file()
    table = bench("decode", tiny_model, "--samples", "1")
    assert "plain read" in table.stdout
    assert "commit" in table.stdout


def test_perplexity_is_a_line_a_model(tiny_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    done = bench("perplexity", text, tiny_model, tiny_model, "--window", "32")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert "+0.00 %" in lines[3]


def test_peers_without_programs_say_what_to_build(tmp_path: Path) -> None:
    assert bench("peers").returncode == 2
    done = bench("peers", "--llama", tmp_path)
    assert done.returncode == 1
    assert "no llama-bench in" in done.stderr


def test_experts_on_nodes_are_held_against_the_same_steps_here(tiny_model: Path) -> None:
    rows = report("experts", tiny_model, "--nodes", "1,2", "--streams", "1,3", "--prompt", "4", "--samples", "1")
    assert [case for case in rows if "there" in case] == [
        f"{where}: {what} of {load}, there" for where in ("1 node", "2 nodes") for load in ("1 row", "3 rows") for what in ("layer", "step")
    ]
    assert rows["2 nodes: layer of 3 rows, there"]["details"]["nodes compute us"] > 0  # type: ignore[index]
    assert rows["1 node: step of 1 row, there"]["limit"] == rows["1 node: step of 1 row, local"]["median"]


def test_what_nodes_share_of_the_cores_leaves_the_front_end_its_own() -> None:
    assert share_cores([0, 1], 3, lanes=1) == Cores((0,), ((1,),) * 3, shared=True)
    assert share_cores([2, 3, 4, 5], 3, lanes=1) == Cores((2,), ((3,), (4,), (5,)), shared=False)
    assert share_cores(range(6), 2, lanes=2) == Cores((0, 1), ((2, 3), (4, 5)), shared=False)
    assert share_cores([0], 1, lanes=1) == Cores((0,), ((0,),), shared=True)
