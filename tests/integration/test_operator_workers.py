"""Workers come and go under load at operators' wishes; no request notices."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from colibri.v1 import operator_pb2 as op
from ops.random_model import ModelShape, make_model
from service.config import ConfigError
from tests.integration.operating import STREAMS, Operating, Streams, operating, undisturbed
from tests.integration.serving import PATIENCE, fields_at_fault, reason, serving, until

TOKENS = 1500  # of each of the streams: enough for several changes while all of them run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps long enough for streams to outlast what is done to the workers."""
    path = tmp_path_factory.mktemp("operated") / "model.colibri"
    shape = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, ffn=448, experts=8, top_k=2, vocab=1024, max_context=4096)
    make_model(path, shape, quant="int8")
    return path


@pytest.fixture
def operated(model: Path, tmp_path: Path) -> Iterator[Operating]:
    with operating(model, tmp_path, kv_memory=64 << 20) as running:
        yield running


def ready(workers: list[op.Worker]) -> list[int]:
    return [worker.index for worker in workers if worker.state == op.WORKER_STATE_READY]


def test_scaling_under_load_fails_no_request_and_changes_no_token(operated: Operating) -> None:
    expected = undisturbed(operated.serving, TOKENS)
    streams = Streams(operated.serving.target, TOKENS)
    streams.start()
    sizes = [len(ready(operated.scale(count))) for count in (3, 2, 3, 1, 2)]
    assert sizes == [3, 2, 3, 1, 2]
    assert operated.serving.stats().running == STREAMS, "the streams ended before the last change"
    assert streams.join() == expected
    assert not streams.errors
    operated.serving.wait_idle()


def test_draining_and_restarting_under_load_fails_no_request_and_changes_no_token(operated: Operating) -> None:
    expected = undisturbed(operated.serving, TOKENS)
    operated.scale(2)
    streams = Streams(operated.serving.target, TOKENS)
    streams.start()
    old = {worker.index: worker.pid for worker in operated.workers()}
    operated.stub.RestartWorker(op.RestartWorkerRequest(worker=0), timeout=PATIENCE)
    left = operated.stub.Drain(op.DrainRequest(worker=1), timeout=PATIENCE).workers
    assert ready(list(left)) == [0]
    assert operated.workers()[0].pid != old[0]
    assert ready(list(operated.stub.Drain(op.DrainRequest(node=0), timeout=PATIENCE).workers)) == []
    assert len(ready(operated.scale(2))) == 2
    assert operated.serving.stats().running == STREAMS, "the streams ended before the last change"
    assert streams.join() == expected
    assert not streams.errors


def test_scaling_again_to_the_same_changes_nothing(operated: Operating) -> None:
    first = operated.scale(2)
    again = operated.scale(2)
    assert [worker.pid for worker in again] == [worker.pid for worker in first]


def test_workers_that_stay_keep_their_processes(operated: Operating) -> None:
    (before,) = operated.scale(1)
    after = operated.scale(3)
    assert before.pid in [worker.pid for worker in after]


def test_two_operators_at_once_are_served_in_turn(operated: Operating) -> None:
    results: list[list[op.Worker]] = []
    threads = [threading.Thread(target=lambda count=count: results.append(operated.scale(count))) for count in (1, 3, 2, 3, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(results) == 6
    assert ready(operated.workers()) == ready(results[-1])


def test_threads_alone_can_be_scaled_on_all_nodes(operated: Operating) -> None:
    (worker,) = operated.scale(None, node=None, threads=2)
    assert len(worker.lanes) == 2


@pytest.mark.parametrize(
    ("request_", "code", "why"),
    [
        (op.ScaleWorkersRequest(node=7, workers=1), grpc.StatusCode.NOT_FOUND, "UNKNOWN_NODE"),
        (op.ScaleWorkersRequest(node=0), grpc.StatusCode.INVALID_ARGUMENT, "workers"),
        (op.ScaleWorkersRequest(node=0, workers=256), grpc.StatusCode.INVALID_ARGUMENT, "workers"),
        (op.ScaleWorkersRequest(node=0, workers=1, threads=0), grpc.StatusCode.INVALID_ARGUMENT, "threads"),
        (op.ScaleWorkersRequest(node=0, workers=255, threads=255), grpc.StatusCode.INVALID_ARGUMENT, "workers"),
        (op.ScaleWorkersRequest(node=0, workers=1, model="none"), grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    ],
    ids=["node", "nothing", "too-many", "no-thread", "no-room", "model"],
)
def test_what_cannot_be_had_is_refused_and_changes_nothing(
    operated: Operating, request_: op.ScaleWorkersRequest, code: grpc.StatusCode, why: str
) -> None:
    before = [worker.pid for worker in operated.workers()]
    with pytest.raises(grpc.RpcError) as refused:
        operated.stub.ScaleWorkers(request_, timeout=PATIENCE)
    assert refused.value.code() is code
    assert why == reason(refused.value) if code is grpc.StatusCode.NOT_FOUND else why in fields_at_fault(refused.value)
    assert [worker.pid for worker in operated.workers()] == before


def test_a_worker_that_is_not_there_is_not_found(operated: Operating) -> None:
    for call in (
        lambda: operated.stub.RestartWorker(op.RestartWorkerRequest(worker=9), timeout=PATIENCE),
        lambda: operated.stub.Drain(op.DrainRequest(worker=9), timeout=PATIENCE),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert reason(refused.value) == "UNKNOWN_WORKER"


def test_scaling_that_fails_puts_back_what_there_was(operated: Operating, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [worker.pid for worker in operated.workers()]
    monkeypatch.setattr("workers.process.command", lambda *_, **__: ["/bin/false"])
    with pytest.raises(grpc.RpcError) as failed:
        operated.scale(3)
    assert failed.value.code() is grpc.StatusCode.ABORTED
    assert reason(failed.value) == "SCALE_FAILED"
    assert [worker.pid for worker in operated.workers()] == before
    monkeypatch.undo()
    assert len(ready(operated.scale(3))) == 3


def test_topology_tells_the_machine_and_the_placement(operated: Operating) -> None:
    response = operated.stub.Topology(op.TopologyRequest(), timeout=PATIENCE)
    assert sorted(os.sched_getaffinity(0)) == list(response.cpus_allowed) == sorted(cpu for core in response.cores for cpu in core.cpus)
    assert {cpu for node in response.nodes for cpu in node.cpus} == set(response.cpus_allowed)
    assert 0 < response.memory_available_bytes <= response.memory_limit_bytes
    (placement,) = response.placements
    assert placement.model == operated.serving.server.default.name
    assert placement.bytes == operated.serving.server.default.model.info.file_bytes
    assert placement.reason


# ---------------------------------------------------------------- statistics


def test_watching_tells_what_happens(operated: Operating) -> None:
    watch = operated.stub.WatchStats(op.WatchStatsRequest(interval_ms=50), timeout=PATIENCE)
    (first,) = next(watch).models
    assert (first.tokens, first.steps, first.running) == (0, 0, 0)
    streams = Streams(operated.serving.target, 400)
    streams.start()
    tokens = routed = steps = 0
    busy = False
    while tokens < STREAMS * 400:
        (stats,) = next(watch).models
        tokens += stats.tokens
        steps += stats.steps
        routed += sum(stats.load.layers[0].tokens)
        busy |= stats.running == STREAMS and stats.lanes_busy > 0.1 and stats.kv_blocks_held > 0
        assert len(stats.load.layers) == 4
        assert [worker.worker.state for worker in stats.workers] == [op.WORKER_STATE_READY]
    streams.join()
    assert busy
    assert tokens == STREAMS * 400
    assert routed == 2 * STREAMS * (9 + 399)  # two experts a row; the last token of an answer is not run
    assert 399 <= steps <= 2 * 400


def test_a_watcher_that_does_not_read_holds_nothing_up(operated: Operating) -> None:
    lazy = [operated.stub.WatchStats(op.WatchStatsRequest(interval_ms=50), timeout=PATIENCE) for _ in range(20)]
    for watch in lazy:
        next(watch)
    undisturbed(operated.serving, 300)
    assert len(ready(operated.scale(2))) == 2


def test_watchers_see_a_killed_worker_come_back(operated: Operating) -> None:
    watch = operated.stub.WatchStats(op.WatchStatsRequest(interval_ms=50, experts=False), timeout=PATIENCE)
    (stats,) = next(watch).models
    assert not any(layer.tokens or layer.active for layer in stats.load.layers)
    os.kill(stats.workers[0].worker.pid, signal.SIGKILL)
    restarts = 0
    while not restarts:
        (stats,) = next(watch).models
        restarts += stats.worker_restarts
    assert restarts == 1
    until(lambda: ready(operated.workers()) == [0], "it is back")


@pytest.mark.parametrize("interval", [0, 49, 60_001])
def test_an_interval_out_of_range_is_refused(operated: Operating, interval: int) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        next(operated.stub.WatchStats(op.WatchStatsRequest(interval_ms=interval), timeout=PATIENCE))
    assert fields_at_fault(refused.value) == ["interval_ms"]


def test_a_change_whose_caller_has_gone_before_its_turn_is_dropped(operated: Operating) -> None:
    hosted, loop = operated.serving.server.default, operated.serving.loop
    asyncio.run_coroutine_threadsafe(hosted.changes.acquire(), loop).result(PATIENCE)
    request = op.ScaleWorkersRequest(node=0, workers=3)
    with pytest.raises(grpc.RpcError) as late:
        operated.stub.ScaleWorkers(request, timeout=0.3)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: not operated.serving.server.host._changes, "the change is dropped")
    loop.call_soon_threadsafe(hosted.changes.release)
    assert ready(operated.scale(2)) == [0, 1]
    assert len(hosted.team.plan.workers) == 2


def test_a_watcher_s_stream_ends_regularly_with_the_server(model: Path, tmp_path: Path) -> None:
    with operating(model, tmp_path) as running:
        watch = running.stub.WatchStats(op.WatchStatsRequest(interval_ms=60_000), timeout=PATIENCE)
        next(watch)
        running.serving.loop.call_soon_threadsafe(running.serving.server.request_stop)
        assert list(watch) == []
        assert watch.code() is grpc.StatusCode.OK


def test_changes_that_have_not_begun_do_not_hold_up_the_end(model: Path, tmp_path: Path) -> None:
    with operating(model, tmp_path) as running:
        server = running.serving.server
        calls = [running.stub.RestartWorker.future(op.RestartWorkerRequest(worker=0), timeout=PATIENCE) for _ in range(90)]
        calls[0].result()
        running.serving.loop.call_soon_threadsafe(server.request_stop)
        until(lambda: server.host.draining, "it goes down")
        refused = [error for call in calls if isinstance(error := call.exception(), grpc.RpcError)]
        assert {(error.code(), reason(error)) for error in refused} == {(grpc.StatusCode.UNAVAILABLE, "DRAINING")}
        until(running.serving.loop.is_closed, "it has ended")



# ---------------------------------------------------------------- the socket


def test_the_socket_is_its_user_s_alone_and_goes_with_the_server(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_RUNTIME", str(tmp_path / "colibri"))
    with serving(tiny_model, operator_socket="auto") as running:
        path = tmp_path / "colibri" / f"operator-{running.server.port}.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with grpc.insecure_channel(f"unix:{path}") as channel:
            listed = set(ProtoReflectionDescriptorDatabase(channel).get_services())
        assert {"colibri.v1.Operator", "grpc.reflection.v1alpha.ServerReflection"} == listed
    assert not path.exists()


def test_a_live_server_s_socket_is_not_taken(operated: Operating, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="another server listens there"), serving(tiny_model, operator_socket=str(operated.socket)):
        pass
    assert operated.workers()


def test_a_dead_server_s_socket_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    import socket

    path = tmp_path / "operators.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with operating(tiny_model, tmp_path) as running:
        assert running.workers()


def test_a_folder_open_to_others_gets_no_socket_and_stops_no_server(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_RUNTIME", str(tmp_path / "colibri"))
    (tmp_path / "colibri").mkdir(mode=0o755)
    with serving(tiny_model, operator_socket="auto") as running:
        assert running.client.model().name
        assert list((tmp_path / "colibri").iterdir()) == []
