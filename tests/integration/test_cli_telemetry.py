"""`colibri record`, `top` and `rebalance` as people run them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import Client, generate_request
from service.load import between
from service.recording import Header, Recording, Window, header_line, read_recording, window_line
from tests.integration.serving import Process, serving_process
from tests.unit.service.loads import Counters

CLI = [sys.executable, "-m", "ops.cli"]
DEADLINE = 30.0
ROWS = 30  # of each request: the last token of the answer is not run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def served(tiny_model: Path, folder: Path) -> Iterator[Process]:
    with serving_process(tiny_model, folder, name="mix", operator_socket=folder / "operators", workers_per_node=0) as process:
        yield process


def call(*arguments: object, columns: int = 160) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"COLUMNS": str(columns), "GRPC_VERBOSITY": "NONE"}
    command = [*CLI, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE, env=environ)


def done(*arguments: object) -> subprocess.CompletedProcess[str]:
    result = call(*arguments)
    assert result.returncode == 0, result.stderr
    return result


def failed(*arguments: object, code: int = 1) -> str:
    result = call(*arguments)
    assert result.returncode == code, result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def recorded(path: Path, expected: int) -> Recording:
    """Once so many rows have been recorded."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            recording = read_recording(path)
            if recording.windows and int(recording.total().rows[0]) >= expected:
                return recording
        time.sleep(0.05)
    raise AssertionError(f"{expected} rows were not recorded in time")


def ask(target: str, seed: int) -> None:
    prompt = [(seed * 131 + 7 * place) % 200 + 3 for place in range(ROWS // 2)]
    with Client(target, timeout=DEADLINE) as client:
        client.complete(generate_request(tokens=prompt, max_tokens=ROWS // 2 + 1, temperature=0, ignore_eos=True))


def test_what_is_recorded_is_what_was_sent(served: Process, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "traffic"
    command = [*CLI, "record", str(out), "-i", "0.1", "--operator", f"unix:{folder}/operators"]
    recorder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + DEADLINE
    while not out.exists() or len(out.read_bytes().splitlines()) < 2:  # a window: it watches
        assert time.monotonic() < end
        time.sleep(0.02)
    for seed in range(3):
        ask(served.target, seed)
    header = recorded(out, 3 * ROWS).header
    recorder.send_signal(signal.SIGINT)
    assert "of mix, in" in recorder.communicate(timeout=DEADLINE)[1]
    assert recorder.returncode == 0
    recording = read_recording(out)
    total = recording.total()
    assert (header.model, header.top_k, header.interval_seconds, header.places) == ("mix", 2, 0.1, ())
    assert total.rows.tolist() == [3 * ROWS] * header.layers
    assert total.tokens.sum(axis=1).tolist() == [3 * ROWS * header.top_k] * header.layers
    assert total.seconds == pytest.approx(recording.windows[-1].at, abs=0.05)
    assert any(window.load.idle for window in recording.windows)
    assert "exists" in failed("record", out, "--operator", f"unix:{folder}/operators")


def test_recording_ends_by_itself_and_within_its_size(served: Process, folder: Path, tmp_path: Path) -> None:
    result = done("record", tmp_path / "out", "-i", "0.05", "--seconds", "0.5", "--model", "mix", "--operator", f"unix:{folder}/operators")
    assert result.stdout == ""
    assert 2 <= len(read_recording(tmp_path / "out").windows) <= 10
    assert "at least 64.0 KiB" in failed("record", tmp_path / "more", "--max-size", "1K", code=2)
    assert "no model 'none'" in failed("record", tmp_path / "more", "--model", "none", "--operator", f"unix:{folder}/operators")
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("columns", [200, 80, 30])
def test_top_shows_how_experts_are_used_at_any_width(served: Process, folder: Path, columns: int) -> None:
    ask(served.target, columns)
    for window in ("10", "60"):
        result = call("top", "--once", "-i", "0.05", "--window", window, "--operator", f"unix:{folder}/operators", columns=columns)
        assert result.returncode == 0, result.stderr
        for part in ("routing of", "max/mean", "variance", "longest", "rerouted", "active", "a step"):
            assert part in result.stdout
    assert "windows of 1, 10, 60 seconds" in failed("top", "--once", "--window", "7", "--operator", f"unix:{folder}/operators")


def test_rebalancing_one_node_is_answered_with_a_sentence(served: Process, folder: Path) -> None:
    for arguments in (["--dry-run"], [], ["--replicas", "2"]):
        lines = done("rebalance", *arguments, "--operator", f"unix:{folder}/operators").stdout.splitlines()
        assert len(lines) == 1
        assert "nothing to place" in lines[0]
    message = json.loads(done("rebalance", "--dry-run", "--json", "--operator", f"unix:{folder}/operators").stdout)
    assert (message["moves"], message["done"]) == ([], False)


# ---------------------------------------------------------------- without a server


def record(path: Path, *, places: tuple[tuple[tuple[int, ...], ...], ...] = (), end: bytes = b"") -> Path:
    """Traffic that sends most tokens to the first two of eight experts."""
    header = Header(
        model="m", layers=2, experts=8, top_k=2, expert_bytes=1 << 20, interval_seconds=1.0, started="2026-01-31T12:00:00Z", places=places
    )
    counters = Counters.zero(2, 8).step([[90, 80, 5, 5, 5, 5, 5, 5]] * 2, top_k=2)
    path.write_bytes(header_line(header) + window_line(Window(1.0, between(counters, None, seconds=1.0))) + end)
    return path


def test_a_recording_is_planned_without_a_server(tmp_path: Path) -> None:
    path = record(tmp_path / "r")
    result = done("rebalance", "--dry-run", "--from", path, "--nodes", "4", "--last", "60")
    assert result.stdout.startswith("would be done: on 4 NUMA nodes, max/mean falls from 3.40 to ")
    assert "NUMA node" in result.stdout.splitlines()[1]
    alone = done("rebalance", "--dry-run", "--from", path, "--nodes", "1")
    assert alone.stdout == "one NUMA node: nothing to place\n"
    plain = json.loads(done("rebalance", "--dry-run", "--json", "--from", path, "--nodes", "4").stdout)
    copied = json.loads(done("rebalance", "--dry-run", "--json", "--from", path, "--nodes", "4", "--replicas", "2").stdout)
    assert plain["max_over_mean_after"] == pytest.approx(1.8)  # the first expert has a node by itself
    assert copied["max_over_mean_after"] < plain["max_over_mean_after"]
    assert (plain["copies"], len(copied["copies"]) > 0) == ([], True)
    assert plain["done"] is False


def test_places_that_were_recorded_are_where_planning_begins(tmp_path: Path) -> None:
    even = tuple(((0,), (1,)) * 4 for _ in range(2))
    result = done("rebalance", "--dry-run", "--from", record(tmp_path / "r", places=even))
    assert "not worth it: it would save 4.8%" in result.stdout


def test_a_torn_recording_is_planned_and_that_is_said(tmp_path: Path) -> None:
    result = done("rebalance", "--dry-run", "--from", record(tmp_path / "r", end=b'{"at": 2'), "--nodes", "2")
    assert "line 3 has no end and was left out" in result.stderr


def test_what_cannot_be_planned_is_one_line(tmp_path: Path) -> None:
    path = record(tmp_path / "r")
    assert "say with --nodes how many" in failed("rebalance", "--dry-run", "--from", path)
    assert "give --dry-run too" in failed("rebalance", "--from", path, "--nodes", "2", code=2)
    assert "go with --from" in failed("rebalance", "--nodes", "2", code=2)
    assert "No such file" in failed("rebalance", "--dry-run", "--from", tmp_path / "none", "--nodes", "2")
    garbage = record(tmp_path / "g", end=b"garbage\n")
    assert "line 3: it is no JSON" in failed("rebalance", "--dry-run", "--from", garbage, "--nodes", "2")
    garbage.write_bytes(garbage.read_bytes().splitlines(keepends=True)[0])
    assert "has no window" in failed("rebalance", "--dry-run", "--from", garbage, "--nodes", "2")
