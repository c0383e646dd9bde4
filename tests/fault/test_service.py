"""The service while its processes die: what a caller, a load balancer and the machine see."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from colibri.v1 import inference_pb2 as pb
from ops.processes import service_processes
from ops.random_model import ModelShape, make_model
from service.client import Client, generate_request
from tests.fault.harness import alive, limit, wait_for
from tests.fault.inject import exit_quietly
from tests.fault.load import Load, answers
from tests.fault.served import RolledBack, Served, colibri_serve
from tests.integration.serving import Serving, reason, serving, until
from workers import process
from workers.lifecycle import State

ROOT = Path(__file__).resolve().parents[2]
READINESS = "colibri.v1.Inference"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SHAPE = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, ffn=448, experts=8, top_k=2, vocab=1024, max_context=2048)
WAYS = ("SIGKILL", "SIGSEGV", "SIGABRT", "_exit(0)", "SIGSTOP")
WORKERS = 2


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of 1500 tokens take it a good part of a second."""
    path = tmp_path_factory.mktemp("served") / "model.colibri"
    make_model(path, SHAPE, quant="int8")
    return path


@pytest.fixture(scope="module")
def served(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`colibri serve` with two workers."""
    with colibri_serve(served_model, tmp_path_factory.mktemp("serve"), workers=WORKERS, options="--kv-memory 64MiB") as server:
        yield server


def request(*, prompt: int = 5, tokens: int = 100, seed: int = 1) -> pb.GenerateRequest:
    """A sampled answer to a prompt of so many tokens."""
    ids = [3 + (7 * i + seed) % 900 for i in range(prompt)]
    return generate_request(tokens=ids, max_tokens=tokens, temperature=0.8, seed=seed, ignore_eos=True)


def die(how: str, pid: int) -> None:
    if how == "_exit(0)":
        wait_for(lambda: exit_quietly(pid), seconds=10, what="it waits in a system call and can be made to exit")
    else:
        os.kill(pid, signal.Signals[how])


def readiness(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=READINESS), timeout=30).status)


# ---------------------------------------------------------------- a worker dies


@pytest.mark.parametrize("moment", ["load", "prefill", "decode"])
@pytest.mark.parametrize("how", WAYS)
def test_no_way_of_dying_hangs_an_answer_or_turns_health(how: str, moment: str, served: Served) -> None:
    wish = request(prompt=1500, tokens=40) if moment == "prefill" else request(tokens=200)
    with Client(served.target, timeout=60) as client:
        expected = client.complete(wish)
        victim = wait_for_one_that_is_long_ready(served)
        if moment == "load":  # of the worker: it dies on its way to become one
            before = set(served.pids())
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: bool(set(served.pids()) - before), seconds=10, what="a successor")
            victim = (set(served.pids()) - before).pop()
        call = client.stub.Generate(wish)
        call.initial_metadata()
        got = [next(call)] if moment == "decode" else []
        die(how, victim)
        assert readiness(served.target) == SERVING
        got += list(call)
    assert tokens_of(got) == expected.token_ids
    wait_for(lambda: all_ready(served, but=victim), seconds=15, what="a worker in its place")
    assert served.zombies() == []


def wait_for_one_that_is_long_ready(served: Served) -> int:
    """A worker whose end is no quick one, so that nothing but its start delays its successor."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [worker.pid for worker in served.ready() if worker.in_state_seconds > 1.0]
        return bool(found)

    wait_for(look, seconds=20, what="a worker that has been ready for a second")
    return found[0]


def tokens_of(responses: list[pb.GenerateResponse]) -> tuple[int, ...]:
    return tuple(token for response in responses for token in response.delta.token_ids)


def all_ready(served: Served, *, but: int) -> bool:
    pids = [worker.pid for worker in served.ready()]
    return len(pids) == served.wanted and but not in pids


def test_scaling_with_a_fault_at_every_step_fails_no_call(served_model: Path, tmp_path: Path) -> None:
    """2 -> 4 -> 1 -> 3 workers, all there are being killed meanwhile. A change may be refused, but then all is as it was."""
    with colibri_serve(served_model, tmp_path, workers=2, options="--kv-memory 64MiB") as server:
        load = Load(server.target, answers(server.target, timeout=60), streams=8, timeout=120)
        load.start()
        try:
            for wish in (4, 1, 3):
                killer = threading.Timer(0.05, kill_all, (server.pids(),))
                killer.start()
                with contextlib.suppress(RolledBack):
                    server.scale(wish)
                killer.join()
                wait_for(lambda: len(server.ready()) == server.wanted, seconds=20, what=f"{server.wanted} workers")
            server.scale(3)
        finally:
            load.stop()
        assert load.troubles() == 0, [(stream.failed, stream.wrong) for stream in load.streams]
        assert server.zombies() == []
        assert server.terminate() == 0


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------- nobody computes


@contextlib.contextmanager
def without_front_lane(model: Path, **settings: object) -> Iterator[Serving]:
    with serving(model, workers_per_node=WORKERS, threads_per_worker=1, front_lane="off", kv_memory=64 << 20, **settings) as server:
        yield server


def signal_workers(server: Serving, number: signal.Signals) -> None:
    for worker in server.server.default.team.supervisor.snapshot().workers:
        if worker.pid is not None:
            os.kill(worker.pid, number)


@contextlib.contextmanager
def health_of(server: Serving) -> Iterator[Callable[[int], float]]:
    """wait(status): until the watched readiness is so; returns when that came (time.monotonic)."""
    with grpc.insecure_channel(server.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS), timeout=120)

        def wait(status: int) -> float:
            while next(watch).status != status:
                pass
            return time.monotonic()

        yield wait
        watch.cancel()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_health_turns_within_250_ms_of_the_last_lane_and_back_by_itself(number: signal.Signals, served_model: Path) -> None:
    """Workers killed, and idle workers stopped, which computes nothing and says nothing."""
    with without_front_lane(served_model) as server, health_of(server) as wait:
        wait(SERVING)
        struck = time.monotonic()
        signal_workers(server, number)
        assert wait(NOT_SERVING) - struck < limit(0.25)
        assert wait(SERVING) - struck < limit(5)
        assert len(server.client.complete(request()).token_ids) == 100


@pytest.mark.parametrize("grace", [0.5, 60.0])
def test_workers_that_can_not_start_are_told_quickly_and_are_back_without_a_restart_of_the_server(
    grace: float, served_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way ends when the grace has passed, or waits until there are workers again; what is new is refused at once."""
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no')\n")
    with without_front_lane(served_model, lane_grace=grace) as server, health_of(server) as wait:
        wish = request(tokens=1000)
        expected = server.client.complete(wish)
        wait(SERVING)
        call = server.client.stub.Generate(wish)
        got = [next(call)]
        monkeypatch.setattr(process, "MAIN", broken)
        struck = time.monotonic()
        signal_workers(server, signal.SIGKILL)
        assert wait(NOT_SERVING) - struck < limit(0.25)
        until(lambda: all_failed(server), "the supervisor gives up")
        until(lambda: server.server.default.desk.unable, "the server has noticed")
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as refused:
            server.client.complete(request())
        assert time.monotonic() - began < limit(0.25)
        assert (refused.value.code(), reason(refused.value)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        if grace < 60:
            with pytest.raises(grpc.RpcError):
                list(call)
            assert (call.code(), reason(call)) == (grpc.StatusCode.ABORTED, "WORKER_LOST")
        monkeypatch.undo()
        wait(SERVING)
        assert server.client.complete(wish).token_ids == expected.token_ids
        if grace >= 60:
            assert tokens_of(got + list(call)) == expected.token_ids


def all_failed(server: Serving) -> bool:
    return all(worker.state is State.FAILED for worker in server.server.default.team.supervisor.snapshot().workers)


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
