"""The operators' commands as people run them, against a server in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.models import resolve

CLI = [sys.executable, "-m", "ops.cli"]
DEADLINE = 30.0


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers put their operators' sockets."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve("random", cache=tmp_path_factory.mktemp("cache")).path


def environment(runtime: Path) -> dict[str, str]:
    return os.environ | {"COLIBRI_RUNTIME": str(runtime / "colibri"), "TERM": "xterm"}


def start(model: Path, runtime: Path, *options: str) -> subprocess.Popen[str]:
    """A server that is up."""
    workers = ["--workers-per-node", "1", "--threads-per-worker", "1", "--kv-memory", "64MiB", "--port", "0"]
    process = subprocess.Popen([*CLI, "serve", str(model), *workers, *options], stderr=subprocess.PIPE, text=True, env=environment(runtime))
    assert process.stderr is not None
    for line in process.stderr:
        if "operators: " in line:
            return process
    raise AssertionError(f"the server ended with {process.wait()}")


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=DEADLINE)


@pytest.fixture(scope="module")
def served(model: Path, runtime: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(model, runtime)
    yield process
    stop(process)


def call(runtime: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, check=False, timeout=DEADLINE, env=environment(runtime))


def done(runtime: Path, *arguments: str) -> str:
    result = call(runtime, *arguments)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout


def failed(runtime: Path, *arguments: str) -> str:
    """Its one line of error."""
    result = call(runtime, *arguments)
    assert result.returncode == 1, result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_the_server_is_found_and_its_workers_listed(served: subprocess.Popen[str], runtime: Path) -> None:
    lines = done(runtime, "workers").splitlines()
    assert lines[0].split()[:5] == ["model", "worker", "NUMA", "node", "state"]
    assert lines[1].split()[1:4] == ["0", "0", "ready"]
    (worker,) = json.loads(done(runtime, "workers", "--json"))["workers"]
    assert (worker["index"], worker["state"]) == (0, "WORKER_STATE_READY")


def test_workers_are_scaled_drained_and_restarted(served: subprocess.Popen[str], runtime: Path) -> None:
    def count(*arguments: str) -> int:
        workers = json.loads(done(runtime, *arguments, "--json"))["workers"]
        return sum(worker["state"] == "WORKER_STATE_READY" for worker in workers)

    assert count("scale", "--node", "0", "--workers", "3") == 3
    assert count("drain", "--worker", "1") == 2
    assert count("drain", "--node", "0") == 0
    assert count("scale", "--workers", "1", "--threads", "2") == 1
    (before,) = json.loads(done(runtime, "workers", "--json"))["workers"]
    after = json.loads(done(runtime, "restart-worker", str(before["index"]), "--json"))["worker"]
    assert after["pid"] != before["pid"]
    assert "no worker 77" in failed(runtime, "restart-worker", "77")
    assert "256 threads in all workers are asked for, there is room for " in failed(runtime, "scale", "--workers", "128", "--threads", "2")
    assert "no NUMA node 77" in failed(runtime, "scale", "--node", "77", "--workers", "1")
    assert call(runtime, "scale").returncode == 2
    assert call(runtime, "drain").returncode == 2


def test_the_lanes_of_now_are_shown_and_none_left_is_said(served: subprocess.Popen[str], runtime: Path) -> None:
    def lanes() -> int:
        return int(json.loads(done(runtime, "top", "--json", "-i", "0.1"))["models"][0]["lanes"])

    assert "lane ids" in done(runtime, "scale", "--workers", "2", "--threads", "1").splitlines()[0]
    assert lanes() == 3, "two workers' and the front end's, though no step has run"
    done(runtime, "scale", "--workers", "1")
    assert lanes() == 2
    assert "no workers: " in done(runtime, "scale", "--workers", "0")
    assert lanes() == 1
    done(runtime, "scale", "--workers", "1")


def test_a_pipe_gets_whole_lines(served: subprocess.Popen[str], runtime: Path, model: Path, tmp_path: Path) -> None:
    long = tmp_path / ("deep" * 40) / ("model" * 40 + ".colibri")
    long.parent.mkdir()
    long.symlink_to(model)
    loaded = done(runtime, "models", "load", str(long), "--name", "long", "--kv-memory", "16MiB", "--workers-per-node", "0")
    try:
        assert str(long) in loaded.splitlines()[1]
        assert str(long) in done(runtime, "models").splitlines()[2]
    finally:
        done(runtime, "models", "unload", "long")


def test_models_are_loaded_swapped_and_unloaded(served: subprocess.Popen[str], runtime: Path, model: Path) -> None:
    assert "loaded in" in done(runtime, "models", "load", str(model), "--name", "second", "--kv-memory", "16MiB", "--workers-per-node", "1")
    first, second = (line.split()[0] for line in done(runtime, "models").splitlines()[1:])
    assert second == "second"
    assert "second is the default" in done(runtime, "models", "swap", "second")
    assert "is the default" in failed(runtime, "models", "unload", "second")
    assert f"{first} is the default" in done(runtime, "swap", first)
    assert "unloaded second" in done(runtime, "models", "unload", "second")
    assert [listed["name"] for listed in json.loads(done(runtime, "models", "--json"))["models"]] == [first]
    assert "no model 'second'" in failed(runtime, "swap", "second")
    assert "NAME" not in done(runtime, "topology")


def test_top_prints_one_frame_or_one_message(served: subprocess.Popen[str], runtime: Path) -> None:
    frame = done(runtime, "top", "--once", "-i", "0.1")
    for part in ("tokens/s", "queue", "KV", "lanes", "NUMA-local", "worker ", "NUMA node 0"):
        assert part in frame
    message = json.loads(done(runtime, "top", "--json", "-i", "0.1"))
    assert 0.05 < message["interval_seconds"] < 5
    assert message["models"][0]["state"] == "MODEL_STATE_SERVING"


def read_terminal(terminal: int, until: bytes) -> bytes:
    shown, end = b"", time.monotonic() + DEADLINE
    while until not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536)
    return shown


def live_top(runtime: Path) -> tuple[subprocess.Popen[bytes], int]:
    """`colibri top` on a terminal, showing something."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*CLI, "top", "-i", "0.1"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(runtime), start_new_session=True
    )
    os.close(theirs)
    read_terminal(ours, b"tokens/s")
    return process, ours


def test_live_top_ends_cleanly_on_ctrl_c(served: subprocess.Popen[str], runtime: Path) -> None:
    process, terminal = live_top(runtime)
    process.send_signal(signal.SIGINT)
    shown = read_terminal(terminal, b"\x1b[?1049l")  # the terminal's own screen is back
    assert process.wait(DEADLINE) == 0
    assert b"Traceback" not in shown
    os.close(terminal)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_live_top_ends_cleanly_with_the_server(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    process = start(model, tmp_path)
    watcher, terminal = live_top(tmp_path)
    process.send_signal(how)
    process.communicate(timeout=DEADLINE)
    shown = read_terminal(terminal, b"the server has ")
    os.close(terminal)
    assert watcher.wait(DEADLINE) == (0 if how is signal.SIGTERM else 1)
    assert b"Traceback" not in shown


def test_without_a_server_there_is_one_clear_error(tmp_path: Path) -> None:
    for command in (["workers"], ["top", "--once"], ["models"], ["scale", "--workers", "2"]):
        assert "no running server found" in failed(tmp_path, *command)


def test_with_several_servers_they_are_named(served: subprocess.Popen[str], runtime: Path, model: Path) -> None:
    second = start(model, runtime)
    try:
        error = failed(runtime, "workers")
        sockets = [word.rstrip(",\n") for word in error.split() if word.startswith("unix:")]
        assert "several servers run" in error
        assert len(sockets) == 2
        assert "ready" in done(runtime, "workers", "--operator", sockets[0])
    finally:
        stop(second)


def test_a_socket_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "No such file" in failed(tmp_path, "workers", "--operator", f"unix:{tmp_path}/none.sock")


def test_a_socket_left_by_a_dead_server_is_said(model: Path, tmp_path: Path) -> None:
    process = start(model, tmp_path)
    process.kill()
    process.communicate()
    (socket,) = (tmp_path / "colibri").iterdir()
    assert "refused" in failed(tmp_path, "workers", "--operator", str(socket))


def test_operators_address_that_is_taken_is_said_before_a_model_is_loaded(model: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")]
    for path in files:
        path.write_text("-----BEGIN CERTIFICATE-----\n")
    options = [option for path in files for option in (f"--operator-{path.stem}", str(path))]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = failed(tmp_path, "serve", str(model), "--port", "0", "--operator-address", address, *options)
    assert f"operators cannot be served on {address}: Address already in use" in error


def test_unknown_variables_are_warned_of(model: Path, tmp_path: Path) -> None:
    strange = {"COLIBRI_KV_MEM": "64M", "COLIBRI_SERVICE_HOST": "10.0.0.1", "COLIBRI_NONSENSE": "1"}
    environ = environment(tmp_path) | strange
    command = [*CLI, "serve", str(model), "--port", "0", "--workers-per-node", "0", "--kv-memory", "16M"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if "operators: " in line:
            break
    stop(process)
    assert "COLIBRI_KV_MEM means nothing to this version and is ignored; COLIBRI_KV_MEMORY was meant?" in seen
    assert "COLIBRI_NONSENSE means nothing" in seen
    assert "COLIBRI_SERVICE_HOST" not in seen
