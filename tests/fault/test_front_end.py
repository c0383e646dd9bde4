"""The front end dies or goes down, and what one worker more costs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ops.processes import service_processes
from service.client import Client
from tests.fault.harness import alive, wait_for
from tests.fault.load import request, tokens_of
from tests.fault.served import Served, colibri_serve

ROOT = Path(__file__).resolve().parents[2]
READINESS = "colibri.v1.Inference"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

# ---------------------------------------------------------------- the front end dies


def memory_of(pids: list[int]) -> set[int]:
    """Inodes of the memfds that processes have mapped or open."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:" in line:
                found.add(int(line.split()[4]))
    return found


def everybody() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def holders(inodes: set[int]) -> list[int]:
    """Processes that have one of these mapped."""
    found = []
    for pid in everybody():
        with contextlib.suppress(OSError):
            if memory_of([pid]) & inodes:
                found.append(pid)
    return found


def test_a_killed_front_end_leaves_no_process_and_no_memory_and_another_starts_at_once(served_model: Path, tmp_path: Path) -> None:
    """Under load, with one worker stopped."""
    shm = sorted(os.listdir("/dev/shm"))
    with colibri_serve(served_model, tmp_path, workers=3, options="--load memfd --kv-memory 64MiB") as server:
        workers = server.pids()
        inodes = memory_of([server.pid, *workers])
        assert len(inodes) >= 3, "model, team and arena"
        with Client(server.target, timeout=30) as client:
            expected = client.complete(request()).token_ids
            calls = [client.stub.Generate(request(tokens=1000, seed=seed)) for seed in range(8)]
            for call in calls:
                next(call)
            os.kill(workers[0], signal.SIGSTOP)
            server.popen.kill()
            with colibri_serve(served_model, tmp_path, workers=3, options="--load memfd --kv-memory 64MiB") as successor:
                wait_for(lambda: not alive([server.pid, *workers]), seconds=2, what="every process gone")
                with Client(successor.target, timeout=30) as other:
                    assert other.complete(request()).token_ids == expected
                assert successor.terminate() == 0
            for call in calls:
                with pytest.raises(grpc.RpcError):
                    list(call)
    assert holders(inodes) == []
    assert sorted(os.listdir("/dev/shm")) == shm


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.06, 0.1])
def test_a_front_end_killed_while_its_workers_start_leaves_none(after: float, served_model: Path, tmp_path: Path) -> None:
    """So many seconds after the first of three."""
    command = [sys.executable, "-m", "ops.cli", "serve", str(served_model), "--unix-socket", str(tmp_path / "s"), "--workers-per-node", "3"]
    with (tmp_path / "log").open("wb") as log:
        popen = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    with popen:
        front = psutil.Process(popen.pid)
        wait_for(lambda: bool(front.children()), seconds=60, what="the first worker")
        threading.Event().wait(after)
        workers = [child.pid for child in front.children()]
        popen.kill()
    assert workers
    wait_for(lambda: not alive(workers), seconds=2, what="every worker gone")


NEWBORN = """
import sys
from pathlib import Path
from tests.fault.harness import config
from workers import process
from workers.slot import SupervisorConfig
from workers.team import Team

process.MAIN = Path(sys.argv[2])
Team.open(sys.argv[1], config(1, supervisor=SupervisorConfig(start_s=600, stop_s=600)))
"""


def test_a_worker_stopped_before_its_first_instruction_does_not_outlive_the_front_end(served_model: Path, tmp_path: Path) -> None:
    """It has asked for nothing yet: neither a signal with its parent's death nor anything else."""
    script = tmp_path / "newborn.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nsignal.pause()\n")
    front_end = subprocess.Popen([sys.executable, "-c", NEWBORN, str(served_model), str(script)], cwd=ROOT)
    with front_end:
        stopped: list[int] = []

        def is_stopped() -> bool:
            children = psutil.Process(front_end.pid).children()
            stopped[:] = [child.pid for child in children if child.status() == psutil.STATUS_STOPPED]
            return bool(stopped)

        wait_for(is_stopped, seconds=20, what="the worker has stopped itself")
        front_end.kill()
    wait_for(lambda: not alive(stopped), seconds=2, what="the stopped worker gone")


# ---------------------------------------------------------------- going down, and how much memory


def test_sigterm_while_workers_die_finishes_every_answer(served_model: Path, tmp_path: Path) -> None:
    with (
        colibri_serve(served_model, tmp_path, workers=3, options="--kv-memory 64MiB") as server,
        Client(server.target, timeout=60) as client,
    ):
        expected = [client.complete(request(tokens=500, seed=seed)).token_ids for seed in range(8)]
        calls = [client.stub.Generate(request(tokens=500, seed=seed)) for seed in range(8)]
        got = [[next(call)] for call in calls]
        with grpc.insecure_channel(server.target) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS), timeout=60)
            assert next(watch).status == SERVING
            workers = server.pids()
            server.popen.send_signal(signal.SIGTERM)
            assert next(watch).status == NOT_SERVING
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            answers = [tokens_of(begun + list(call)) for begun, call in zip(got, calls, strict=True)]
        assert answers == expected
        workers += server.pids()
        assert server.popen.wait(30) == 0, server.log.read_text()
        wait_for(lambda: not alive(workers), seconds=2, what="every worker gone")


def test_a_worker_more_costs_at_most_25_mib(served_model: Path, tmp_path: Path) -> None:
    """Of the whole service's memory, each page counted once."""
    with (
        colibri_serve(served_model, tmp_path, workers=1, options="--kv-memory 64MiB") as server,
        Client(server.target, timeout=60) as client,
    ):
        total = {}
        for workers in (1, 4):
            server.scale(workers)
            wait_for(lambda: used_by_all(server, client), seconds=60, what="all workers compute")
            facts = service_processes(server.pid, served_model)
            assert len(facts) == 1 + workers
            total[workers] = sum(fact.pss for fact in facts)
        assert (total[4] - total[1]) / 3 < 25 << 20


def used_by_all(server: Served, client: Client) -> bool:
    client.complete(request(prompt=500, tokens=20))
    return all(worker.tasks > 200 for worker in server.ready())
