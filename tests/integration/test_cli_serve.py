"""`colibri serve` and its clients as real processes: answers in pipes, health, history, Ctrl-C, SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ops.models import resolve
from ops.processes import service_processes

CLI = [sys.executable, "-m", "ops.cli"]
DEADLINE = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve("random", cache=tmp_path_factory.mktemp("cache")).path


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a unix socket, and the target to reach it."""
    target = f"unix:{tmp_path_factory.mktemp('socket')}/s"
    where = ["--unix-socket", target.removeprefix("unix:")]
    workers = ["--workers-per-node", "1", "--threads-per-worker", "1"]
    command = [*CLI, "serve", str(model), *where, *workers, "--kv-memory", "64MiB"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_serving(process, target)
        yield process, target
    finally:
        process.kill()
        process.communicate()


def wait_serving(process: subprocess.Popen[str], target: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while call("health", target).returncode != 0:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "not serving in time"


def call(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], input=text, capture_output=True, text=True, check=False, timeout=DEADLINE)


def prompt_tokens(summary: str) -> list[int]:
    """The first figure of each summary line."""
    return [int(line.split()[0]) for line in summary.splitlines() if "prompt tokens" in line]


def test_generate_writes_the_text_to_stdout_and_figures_to_stderr(served: tuple[subprocess.Popen[str], str]) -> None:
    options = ("--target", served[1], "--max-tokens", "12", "--temperature", "0")
    done = call("generate", "hello", *options)
    assert done.returncode == 0, done.stderr
    assert "prompt tokens" in done.stderr
    assert "12 generated, length reached" in done.stderr
    assert done.stdout.endswith("\n")
    assert call("generate", *options, "--quiet", text="hello").stdout == done.stdout


def test_generate_takes_token_ids(served: tuple[subprocess.Popen[str], str]) -> None:
    done = call("generate", "--tokens", "1,2,3", "--target", served[1], "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert prompt_tokens(done.stderr) == [3]


def test_chat_keeps_the_history(served: tuple[subprocess.Popen[str], str]) -> None:
    done = call("chat", "--target", served[1], "--max-tokens", "4", "--temperature", "0", text="one\ntwo\n\n/exit\nnever said\n")
    assert done.returncode == 0, done.stderr
    first, second = prompt_tokens(done.stderr)
    assert second > first


def test_token_out_of_range_is_one_line(served: tuple[subprocess.Popen[str], str]) -> None:
    done = call("generate", "--tokens", "9999", "--target", served[1])
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr
    assert done.stderr.count("\n") == 1


def test_deadline_is_kept(served: tuple[subprocess.Popen[str], str]) -> None:
    done = call("generate", "hello", "--target", served[1], "--max-tokens", "400", "--timeout", "0.001")
    assert done.returncode == 1
    assert "DEADLINE_EXCEEDED" in done.stderr


def test_interrupt_of_a_client_is_code_130(served: tuple[subprocess.Popen[str], str]) -> None:
    command = [*CLI, "generate", "hello", "--target", served[1], "--max-tokens", "480"]
    served[0].send_signal(signal.SIGSTOP)  # so that the answer cannot end before the signal comes: it cannot begin either
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would the client
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            wait_connected(process.pid)
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=DEADLINE)
    finally:
        signal.signal(signal.SIGINT, inherited)
        served[0].send_signal(signal.SIGCONT)
    assert process.returncode == 130
    assert b"Traceback" not in log
    assert call("health", served[1]).returncode == 0


def wait_connected(pid: int) -> None:
    """Until a client has a socket, which it opens with its call: what it imported before is behind it."""
    deadline = time.monotonic() + DEADLINE
    while not psutil.Process(pid).net_connections("unix"):
        assert time.monotonic() < deadline, "the client does not connect"
        time.sleep(0.01)


def test_processes_are_described(served: tuple[subprocess.Popen[str], str], model: Path) -> None:
    call("generate", "hello", "--target", served[1], "--max-tokens", "2")
    front, worker = service_processes(served[0].pid, model)
    assert (front.role, worker.role) == ("front end", "worker")
    assert worker.lanes == (0,)
    assert set(front.cpus) | set(worker.cpus) <= os.sched_getaffinity(0)
    assert front.weights > 0
    assert worker.pss < 60 << 20


def test_port_in_use_is_one_error(model: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = call("serve", str(model), "--port", port, "--workers-per-node", "0", "--kv-memory", "16MiB", "--log-level", "error")
    assert done.returncode == 1
    assert "cannot listen" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_with_0(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    target = f"unix:{tmp_path}/s"
    command = [*CLI, "serve", str(model), "--unix-socket", f"{tmp_path}/s", "--workers-per-node", "1", "--kv-memory", "16MiB"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_serving(process, target)
        process.send_signal(number)
        _, log = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, log
    assert "draining" in log
    assert "Traceback" not in log
