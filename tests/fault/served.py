"""`colibri serve` in a process of its own, seen from outside: its workers, and what it holds of the system."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from colibri.v1 import operator_pb2 as op, operator_pb2_grpc
from tests.fault.harness import PATIENCE, wait_for

ROOT = Path(__file__).resolve().parents[2]
START_S = 60


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a front end holds between faults."""

    descriptors: Counter[str]  # by what they are
    threads: int
    rss: int  # bytes


class RolledBack(Exception):
    """A change could not be made and all is as it was; says why."""


class Served:
    """A running server, and an operator of it. wanted: workers there should be once nothing is under way."""

    def __init__(
        self, popen: subprocess.Popen[bytes], target: str, log: Path, operator: operator_pb2_grpc.OperatorStub, *, wanted: int
    ) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.target = target
        self.log = log
        self.operator = operator
        self.wanted = wanted

    def pids(self) -> list[int]:
        """Processes of workers, dead ones that nobody has reaped included."""
        return sorted(child.pid for child in psutil.Process(self.pid).children())

    def ready(self) -> list[op.Worker]:
        """Workers that have joined the team, by what the server says."""
        if self.popen.poll() is not None:
            raise AssertionError(f"the server has ended with code {self.popen.returncode}")
        workers = self.operator.ListWorkers(op.ListWorkersRequest(), timeout=START_S).workers
        return [worker for worker in workers if worker.state == op.WORKER_STATE_READY]

    def scale(self, workers: int) -> None:
        """As an operator does; returns when there are so many. Raises RolledBack if there are as many as before."""
        try:
            self.operator.ScaleWorkers(op.ScaleWorkersRequest(workers=workers), timeout=START_S)
        except grpc.RpcError as refusal:
            if refusal.code() is not grpc.StatusCode.ABORTED:
                raise
            raise RolledBack(refusal.details()) from refusal
        self.wanted = workers

    def zombies(self) -> list[int]:
        """Dead workers that nobody has reaped."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    def holdings(self) -> Holdings:
        """Of the front end, now."""
        links: Counter[str] = Counter()
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                links[os.readlink(f"/proc/{self.pid}/fd/{name}").split(":[")[0]] += 1
        process = psutil.Process(self.pid)
        return Holdings(links, process.num_threads(), process.memory_info().rss)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(START_S)


@contextlib.contextmanager
def colibri_serve(model: Path, folder: Path, *, workers: int, enter: str = ":", options: str = "") -> Iterator[Served]:
    """Starts `colibri serve` on a socket in folder; `enter` is a shell command run in its process first. Ends it if nobody has."""
    socket, operators, log = folder / "serve.sock", folder / "operators.sock", folder / "serve.log"
    command = [sys.executable, "-m", "ops.cli", "serve", str(model), "--unix-socket", str(socket), "--workers-per-node", str(workers)]
    command += ["--threads-per-worker", "1", "--operator-socket", str(operators), *shlex.split(options)]
    with log.open("wb") as out:
        popen = subprocess.Popen(["/bin/sh", "-c", f"{enter}; exec {shlex.join(command)}"], cwd=ROOT, stdout=out, stderr=out)
    try:
        wait_for(lambda: popen.poll() is not None or b"serving" in log.read_bytes(), seconds=START_S, what="the server is up")
        assert popen.poll() is None, log.read_text()
        with grpc.insecure_channel(f"unix:{operators}") as channel:
            yield Served(popen, f"unix:{socket}", log, operator_pb2_grpc.OperatorStub(channel), wanted=workers)
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait(5 * PATIENCE)
