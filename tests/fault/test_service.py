"""The service while its processes die: what a caller, a load balancer and the machine see."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.client import Client
from tests.fault.harness import limit, signalled, wait_for
from tests.fault.inject import exit_quietly
from tests.fault.load import Load, answers, request, tokens_of
from tests.fault.served import RolledBack, Served, colibri_serve
from tests.integration.serving import Serving, reason, serving, until
from workers import process
from workers.lifecycle import State

ROOT = Path(__file__).resolve().parents[2]
READINESS = "colibri.v1.Inference"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WAYS = ("SIGKILL", "SIGSEGV", "SIGABRT", "_exit(0)", "SIGSTOP")
WORKERS = 2


@pytest.fixture(scope="module")
def served(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`colibri serve` with two workers."""
    with colibri_serve(served_model, tmp_path_factory.mktemp("serve"), workers=WORKERS, options="--kv-memory 64MiB") as server:
        yield server


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
        signalled(pid, signal.SIGKILL)


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
def striking_on(server: Serving, number: signal.Signals) -> Iterator[None]:
    """All workers and whatever comes in their place, at once and then every 10 ms: on a fast machine they are back before anybody looks."""
    done = threading.Event()

    def strike() -> None:
        while not done.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal_workers(server, number)
            done.wait(0.01)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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
        with striking_on(server, number):
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
