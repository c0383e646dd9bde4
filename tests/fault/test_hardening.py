"""What a worker can still do once it computes: nothing but that."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.harness import Decoding, config, wait_for
from tests.fault.inject import exit_quietly
from workers.sandbox import AUDIT, REFUSED, filter_program
from workers.slot import WorkerSnapshot
from workers.team import Team

ROOT = Path(__file__).resolve().parents[2]

IN_THE_SANDBOX = """
import ctypes, os, socket, sys, threading
from workers import sandbox
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
print(*sandbox.lock_down(), flush=True)
name = sys.argv[-1]
"""

ATTEMPTS = {
    "a socket": "socket.socket()",
    "a socket pair": "socket.socketpair()",
    "a file to read": "open('/proc/self/status')",
    "a file to write": "open(name, 'w')",
    "a file's end": "os.truncate(name, 0)",
    "a folder": "os.mkdir(name + '.d')",
    "another name": "os.rename(name, name + '.new')",
    "no file": "os.unlink(name)",
    "a process": "os.fork()",
    "a program": "os.execv('/bin/true', ['true'])",
    "its parent's end": "os.kill(os.getppid(), 9)",
    "its parent's descriptors": "os.pidfd_open(os.getppid())",
}


def sandboxed(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that has locked itself down; it prints first what could not be had."""
    return subprocess.run([sys.executable, "-c", IN_THE_SANDBOX + code, *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("wish", ATTEMPTS)
def test_a_locked_process_can_not_have(wish: str, tmp_path: Path) -> None:
    name = tmp_path / "file"
    name.write_text("text")
    code = f"try: {ATTEMPTS[wish]}\nexcept PermissionError: print('refused')\nelse: print('had')"
    run = sandboxed(code, str(name))
    assert run.stdout.split() == ["refused"], run
    assert name.read_text() == "text"
    assert list(tmp_path.iterdir()) == [name]


def test_a_locked_process_can_still_compute_and_end() -> None:
    code = """
ends = []
threads = [threading.Thread(target=lambda: ends.append(sum(range(1000)))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
os.sched_setaffinity(0, os.sched_getaffinity(0))
print(ends, flush=True)
os.abort()
"""
    run = sandboxed(code)
    assert run.stdout.split("\n")[-2] == str([499500] * 4)
    assert run.returncode == -signal.SIGABRT


def test_a_locked_process_has_no_capability_whoever_started_it() -> None:
    code = """
held, header = ctypes.create_string_buffer(24), (ctypes.c_uint32 * 2)(0x20080522, 0)
assert ctypes.CDLL(None).capget(header, held) == 0
print(held.raw.hex())
"""
    assert sandboxed(code).stdout.split() == ["00" * 24]


@pytest.mark.parametrize("machine", AUDIT)
def test_the_filter_refuses_what_the_table_says_and_nothing_else(machine: str) -> None:
    program = filter_program(machine)
    column = list(AUDIT).index(machine)
    refused = {numbers[column] for numbers in REFUSED.values()}
    thread, process = 0x10000, 0
    clone, clone3 = {"x86_64": (56, 435), "aarch64": (220, 435)}[machine]
    for number in range(500):
        expected = "EPERM" if number in refused else "ENOSYS" if number == clone3 else "allow"
        assert verdict(program, AUDIT[machine], number, thread) == expected, number
    assert verdict(program, AUDIT[machine], clone, process) == "EPERM"
    assert verdict(program, 0x40000003, 1, 0) == "EPERM", "calls of another architecture"
    assert machine != "x86_64" or verdict(program, AUDIT[machine], 0x40000001, 0) == "EPERM", "calls of x32"


def verdict(program: list[tuple[int, int, int, int]], machine: int, number: int, argument: int) -> str:
    """What the filter says of a call, by running it."""
    data = {0: number, 4: machine, 16: argument}
    at = register = 0
    while True:
        code, yes, no, operand = program[at]
        at += 1
        match code:
            case 0x20:
                register = data[operand]
            case 0x15:
                at += yes if register == operand else no
            case 0x35:
                at += yes if register >= operand else no
            case 0x45:
                at += yes if register & operand else no
            case 0x06:
                return {0x7FFF0000: "allow", 0x00050001: "EPERM", 0x00050026: "ENOSYS"}[operand]


WITHOUT = """
import ctypes, os, sys
from pathlib import Path
from workers import sandbox
from tests.fault.harness import Decoding, config
from workers.team import Team

ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
refused = [sandbox.CALLS["seccomp"][list(sandbox.AUDIT).index(os.uname().machine)], sandbox.LANDLOCK_CREATE]
denied = [(0x20, 0, 0, 0)]
for number in refused[: 2 if sys.argv[2] == "both" else 1]:
    denied += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050026)]
sandbox.install([*denied, (0x06, 0, 0, 0x7FFF0000)])
with Team.open(Path(sys.argv[1]), config(1)) as team:
    Decoding().run(team.session, steps=3)
    print(*team.supervisor.snapshot().workers[0].degraded, sep="|")
"""


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        ("seccomp", ["seccomp: Function not implemented"]),
        ("both", ["landlock: Function not implemented", "seccomp: Function not implemented"]),
    ],
)
def test_a_worker_that_can_not_be_locked_down_computes_and_says_so(lacking: str, told: list[str], model: Path) -> None:
    """Under a filter of our own that answers as a kernel without them does."""
    run = subprocess.run([sys.executable, "-c", WITHOUT, str(model), lacking], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert [text for text in run.stdout.strip().split("|") if text.startswith(("landlock", "seccomp"))] == told


# ---------------------------------------------------------------- real workers


def the_worker(team: Team) -> tuple[int, WorkerSnapshot]:
    worker = team.supervisor.snapshot().workers[0]
    assert worker.pid is not None
    return worker.pid, worker


def test_a_worker_is_locked_down_and_says_what_the_machine_refused(model: Path) -> None:
    with Team.open(model, config(1)) as team:
        pid, worker = the_worker(team)
        fields = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
        assert fields["NoNewPrivs"] == "1"
        if not any(text.startswith("seccomp") for text in worker.degraded):
            assert fields["Seccomp"] == "2"
        assert fields["CapEff"] == fields["CapPrm"] == "0" * 16
        own = int(Path("/proc/self/oom_score_adj").read_text())
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == min(1000, own + 200)
        assert int(Path(f"/proc/{pid}/coredump_filter").read_text(), 16) & 0b1010 == 0


@pytest.mark.parametrize("inherited", [True, False])
def test_a_worker_has_four_descriptors_whatever_the_front_end_has_open(inherited: bool, model: Path, tmp_path: Path) -> None:
    """Descriptors of the front end that are meant to be inherited, and others, do not get through."""
    with (tmp_path / "secret").open("wb") as secret:
        os.set_inheritable(secret.fileno(), inherited)
        with Team.open(model, config(1)) as team:
            pid, _ = the_worker(team)
            links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    kinds = sorted(re.sub(r"\d+", "N", link) for link in links)
    assert kinds == ["/dev/null", "pipe:[N]", "pipe:[N]", "socket:[N]"], links


def test_a_worker_that_exits_quietly_is_replaced_and_its_end_told(model: Path, undisturbed: list[list[int]]) -> None:
    with Team.open(model, config(1)) as team:
        pid, _ = the_worker(team)
        assert exit_quietly(pid)
        wait_for(lambda: team.supervisor.snapshot().workers[0].last_end != "", seconds=5, what="its end is noticed")
        assert team.supervisor.snapshot().workers[0].last_end == "exited with code 0"
        assert Decoding().run(team.session) == undisturbed
