"""A server whose workers are all dead and cannot start: it says so at once, ends what it has, refuses what comes, and heals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from colibri.v1 import operator_pb2 as op
from service.client import generate_request
from tests.integration.operating import operating
from tests.integration.serving import PATIENCE, fields_at_fault, reason, retry_seconds, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
READINESS = health_pb2.HealthCheckRequest(service="colibri.v1.Inference")
FLIP, REFUSAL = 0.25, 0.25  # seconds, promised
GRACE = 0.5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_workers_that_cannot_start_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    settings = {"front_lane": "off", "lane_grace": GRACE, "max_seqs": 1, "max_rows": 64}
    with operating(tiny_model, tmp_path, **settings) as running, grpc.insecure_channel(running.serving.target) as channel:
        client = running.serving.client
        watch = health_pb2_grpc.HealthStub(channel).Watch(READINESS, timeout=PATIENCE)
        assert next(watch).status == SERVING
        running.serving.gate.shut()
        under_way = client.stub.Generate(generate_request("Hello", max_tokens=500, seed=1, ignore_eos=True))
        under_way.initial_metadata()  # accepted, and so the first
        queued = client.stub.Generate(generate_request("Hello", max_tokens=500, seed=1, ignore_eos=True))
        until(lambda: len(running.serving.server.default.desk.streams) == 2, "both are accepted")
        running.serving.gate.fault = lambda _: running.serving.gate.shut()  # one step, then it waits
        running.serving.gate.open()
        until(lambda: running.serving.gate.entered >= 2, "one step is done, the next waits")

        monkeypatch.setattr("workers.process.command", lambda *_, **__: ["/bin/false"])
        pid = running.workers()[0].pid
        killed = time.monotonic()
        os.kill(pid, how)
        assert next(watch).status == NOT_SERVING
        assert time.monotonic() - killed < FLIP
        running.serving.gate.fault = lambda _: None
        running.serving.gate.open()
        for call, code in ((under_way, grpc.StatusCode.ABORTED), (queued, grpc.StatusCode.UNAVAILABLE)):
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert (ended.value.code(), reason(ended.value)) == (code, "WORKER_LOST")
        assert time.monotonic() - killed < 2 * GRACE + 1  # one grace for all, not one after the other

        asked = time.monotonic()
        with pytest.raises(grpc.RpcError) as refused:
            client.complete(generate_request("Hello", max_tokens=3))
        assert time.monotonic() - asked < REFUSAL
        assert (refused.value.code(), reason(refused.value)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        assert retry_seconds(refused.value) > 0
        assert "exited with code 1" in refused.value.details()
        until(lambda: running.workers()[0].state == op.WORKER_STATE_FAILED, "it is given up")

        monkeypatch.undo()
        running.stub.RestartWorker(op.RestartWorkerRequest(worker=0), timeout=PATIENCE)
        assert next(watch).status == SERVING
        assert client.complete(generate_request("Hello", max_tokens=3, ignore_eos=True)).finish.usage.completion_tokens == 3
        watch.cancel()
        running.serving.wait_idle()


def test_a_request_that_comes_while_a_dead_worker_is_replaced_is_not_refused(tiny_model: Path, tmp_path: Path) -> None:
    with operating(tiny_model, tmp_path, front_lane="off") as running:
        for _ in range(5):
            os.kill(running.workers()[0].pid, signal.SIGKILL)
            answer = running.serving.client.complete(generate_request("Hello", max_tokens=3, ignore_eos=True))
            assert answer.finish.usage.completion_tokens == 3
            until(lambda: running.workers()[0].state == op.WORKER_STATE_READY, "it is back")


@pytest.mark.parametrize(
    ("wish", "field"),
    [(op.DrainRequest(worker=0), "worker"), (op.DrainRequest(node=0), "node"), (op.ScaleWorkersRequest(workers=0), "workers")],
    ids=["worker", "node", "none"],
)
def test_the_last_that_computes_is_not_taken_away(tiny_model: Path, tmp_path: Path, wish: op.DrainRequest, field: str) -> None:
    with operating(tiny_model, tmp_path, front_lane="off") as running:
        call = running.stub.Drain if isinstance(wish, op.DrainRequest) else running.stub.ScaleWorkers
        with pytest.raises(grpc.RpcError) as refused:
            call(wish, timeout=PATIENCE)  # type: ignore[arg-type]
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_at_fault(refused.value) == [field]
        assert running.workers()[0].state == op.WORKER_STATE_READY


def test_a_model_without_a_worker_that_computes_does_not_become_the_default(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with operating(tiny_model, tmp_path, name="one", front_lane="off") as running:
        running.load(tiny_model, "two")
        monkeypatch.setattr("workers.process.command", lambda *_, **__: ["/bin/false"])
        os.kill(running.workers("two")[0].pid, signal.SIGKILL)
        until(lambda: running.workers("two")[0].state == op.WORKER_STATE_FAILED, "it is given up")
        until(lambda: running.serving.server.host.find("two").desk.unable, "it takes nothing new")
        with pytest.raises(grpc.RpcError) as refused:
            running.swap("two")
        assert (refused.value.code(), reason(refused.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_NOT_READY")
        assert running.models()["one"].state == op.MODEL_STATE_SERVING
        assert running.serving.client.complete(generate_request("Hello", max_tokens=3)).finish.model == "one"
