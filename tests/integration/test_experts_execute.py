"""Experts.Execute on a server: a caller's mini-batches beside everybody's streams, each thing that can be wrong with them, and how a
stream ends. That its numbers are right, tests/golden/test_experts_served.py says."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from colibri.v1 import experts_pb2 as pb, experts_pb2_grpc
from engine_c import Session, SessionOptions
from engine_c.remote import ExpertBatch
from ops.random_model import SHAPES, make_model
from service.client import generate_request
from service.node import hello
from service.wire import PROTOCOL
from tests.integration.serving import PATIENCE, Serving, fields_at_fault, reason, serving, until

LAYER, EXPERTS, COUNTS = 1, (0, 2, 3), (70, 1, 90)
ROWS = 100
PAIRS = np.concatenate([np.arange(70), [5], np.arange(10, 100)]).astype(np.int32)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Serving]:
    with serving(tiny_model, experts_api=True, max_rows=48, max_seqs=8) as running:
        yield running


def batch(server: Serving, **changes: Any) -> pb.ExecuteRequest:
    fields = {
        "id": 5,
        "layer": LAYER,
        "experts": EXPERTS,
        "counts": COUNTS,
        "dtype": pb.DATA_TYPE_F32,
        "rows": ROWS,
        "data": rows_of(server).tobytes(),
        "row_of_pair": PAIRS.tobytes(),
    }
    return pb.ExecuteRequest(batch=pb.ExpertBatch(**(fields | changes)))


def rows_of(server: Serving) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(7).standard_normal((ROWS, server.server.default.model.info.hidden), np.float32)


def opening(**fields: Any) -> pb.ExecuteRequest:
    return pb.ExecuteRequest(open=pb.OpenStream(front_end="test", **fields))


def execute(server: Serving, *requests: pb.ExecuteRequest) -> list[pb.ExecuteResponse]:
    with grpc.insecure_channel(server.target) as channel:
        return list(experts_pb2_grpc.ExpertsStub(channel).Execute(iter(requests), timeout=PATIENCE))


def computed_here(server: Serving, kind: str = "f32", data: bytes | None = None) -> bytes:
    """The same batch, whole, on a session of this process."""
    model = server.server.default.team.model
    with Session(model, SessionOptions(max_rows=128, max_seqs=1, max_logit_rows=1, kv_blocks=1, split_down=1)) as session:
        work = ExpertBatch(LAYER, EXPERTS, COUNTS, data or rows_of(server).tobytes(), ROWS, PAIRS.tobytes())
        return bytes(session.run_experts(work, kind=kind))  # type: ignore[arg-type]


def test_a_batch_that_is_cut_into_pieces_has_the_bits_of_the_whole(server: Serving) -> None:
    opened, answer = execute(server, opening(), batch(server))
    assert (opened.opened.protocol, opened.opened.hidden) == (PROTOCOL, server.server.default.model.info.hidden)
    assert len(opened.opened.model_digest) == 64
    assert list(opened.opened.shares) == []
    assert (answer.result.id, answer.result.data) == (5, computed_here(server))
    assert answer.result.compute_ns > 0


def test_rows_may_be_bf16_and_for_the_same_model_prepared(server: Serving) -> None:
    halves = (rows_of(server).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    opened, answer = execute(server, opening(), batch(server, dtype=pb.DATA_TYPE_BF16, data=halves))
    assert answer.result.data == computed_here(server, "bf16", halves)
    _, refused = execute(server, opening(), batch(server, dtype=pb.DATA_TYPE_PREPARED))
    assert "PREPARED" in refused.failed.message
    whole = opening(protocol=PROTOCOL, model_digest=opened.opened.model_digest)
    size = server.server.default.team.session._row_bytes[LAYER]
    prepared = np.random.default_rng(3).integers(0, 60, (ROWS, size), np.uint8).tobytes()
    _, answer = execute(server, whole, batch(server, dtype=pb.DATA_TYPE_PREPARED, data=prepared))
    assert answer.result.data == computed_here(server, "prepared", prepared)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer": 99}, "layer"),
        ({"experts": (0, 2, 9999)}, "experts"),
        ({"counts": (2, 1)}, "counts"),
        ({"dtype": pb.DATA_TYPE_I32}, "dtype"),
        ({"data": b"short"}, "data"),
        ({"row_of_pair": PAIRS[::-1].tobytes()}, "row_of_pair"),
        ({"weights": b"1234"}, "weights"),
        ({"rows": 10**6, "counts": (1, 1, 10**6)}, "counts"),
    ],
)
def test_a_batch_at_fault_fails_alone(server: Serving, changes: dict[str, object], field: str) -> None:
    _, failed, good = execute(server, opening(), batch(server, **changes), batch(server, id=6))
    assert (failed.failed.id, failed.failed.code) == (5, grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert failed.failed.message.startswith(f"{field}: ")
    assert good.result.id == 6


def test_prepared_rows_of_another_length_are_the_callers_mistake(server: Serving) -> None:
    digest = execute(server, opening())[0].opened.model_digest
    wrong = batch(server, dtype=pb.DATA_TYPE_PREPARED, data=bytes(ROWS * 8))
    _, failed = execute(server, opening(protocol=PROTOCOL, model_digest=digest), wrong)
    assert failed.failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_a_batch_fails_while_nobody_computes_and_the_stream_goes_on(tiny_model: Path) -> None:
    with (
        serving(tiny_model, experts_api=True, workers_per_node=1, threads_per_worker=1, front_lane="off") as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        sends: queue.SimpleQueue[pb.ExecuteRequest | None] = queue.SimpleQueue()
        stream = experts_pb2_grpc.ExpertsStub(channel).Execute(iter(sends.get, None), timeout=PATIENCE)
        sends.put(opening())
        assert next(stream).HasField("opened")

        def ask() -> pb.ExecuteResponse:
            sends.put(batch(server))
            return next(stream)

        def ask_of_the_dead() -> pb.BatchFailure | None:
            for worker in server.server.default.team.supervisor.snapshot().workers:
                if worker.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
            answer = ask()
            return answer.failed if answer.HasField("failed") else None

        failed = until(ask_of_the_dead, "a batch finds nobody")
        assert failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
        answer = until(lambda: (found := ask()).HasField("result") and found, "the worker is back")
        assert answer
        assert answer.result.data == computed_here(server)
        sends.put(None)


@pytest.mark.parametrize(
    ("requests", "code", "why"),
    [
        (lambda _: [opening(model_digest="0" * 64)], grpc.StatusCode.FAILED_PRECONDITION, "MODEL_DIFFERS"),
        (lambda _: [opening(protocol=99)], grpc.StatusCode.FAILED_PRECONDITION, "VERSION_DIFFERS"),
        (lambda _: [opening(model="other")], grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
        (lambda server: [batch(server)], grpc.StatusCode.INVALID_ARGUMENT, "BAD_STREAM"),
        (lambda _: [], grpc.StatusCode.INVALID_ARGUMENT, "BAD_STREAM"),
        (lambda _: [opening(kv_blocks=4)], grpc.StatusCode.FAILED_PRECONDITION, "NO_LAYERS"),
        (lambda _: [opening(), opening()], grpc.StatusCode.INVALID_ARGUMENT, "BAD_STREAM"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused(
    server: Serving, requests: Callable[[Serving], list[pb.ExecuteRequest]], code: grpc.StatusCode, why: str
) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        execute(server, *requests(server))
    assert (refusal.value.code(), reason(refusal.value)) == (code, why)
    server.wait_idle()


def test_tokens_and_outputs_stay_as_they_are_beside_each_other(server: Serving) -> None:
    asked = generate_request("a", max_tokens=48, ignore_eos=True, seed=3)
    alone, expected = server.client.complete(asked), computed_here(server)
    with grpc.insecure_channel(server.target) as channel:
        stub = experts_pb2_grpc.ExpertsStub(channel)
        flood = [stub.Execute(iter([opening(), *[batch(server)] * 20]), timeout=PATIENCE) for _ in range(6)]
        beside = server.client.complete(asked)
        answers = [answer for stream in flood for answer in stream if answer.HasField("result")]
    assert beside.text == alone.text
    assert [answer.result.data for answer in answers] == [expected] * 120
    server.wait_idle()


def test_a_caller_that_goes_away_leaves_nothing_behind(server: Serving) -> None:
    with grpc.insecure_channel(server.target) as channel:
        sends: queue.SimpleQueue[pb.ExecuteRequest | None] = queue.SimpleQueue()
        stream = experts_pb2_grpc.ExpertsStub(channel).Execute(iter(sends.get, None), timeout=PATIENCE)
        sends.put(opening())
        assert next(stream).HasField("opened")
        sends.put(batch(server))
        stream.cancel()
        sends.put(None)
    server.wait_idle()


def test_a_server_that_goes_ends_idle_streams_and_finishes_a_batch(tiny_model: Path) -> None:
    with serving(tiny_model, experts_api=True) as server, grpc.insecure_channel(server.target) as channel:
        sends: queue.SimpleQueue[pb.ExecuteRequest | None] = queue.SimpleQueue()
        stream = experts_pb2_grpc.ExpertsStub(channel).Execute(iter(sends.get, None), timeout=PATIENCE)
        sends.put(opening())
        assert next(stream).HasField("opened")
        sends.put(batch(server))
        assert next(stream).HasField("result")
        server.loop.call_soon_threadsafe(server.server.request_stop)
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert (ended.value.code(), reason(ended.value)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        until(lambda: server.server.host.calls == 0, "no call is left")
        sends.put(None)


@contextlib.contextmanager
def silent(stub: experts_pb2_grpc.ExpertsStub, count: int) -> Iterator[list[Any]]:
    """So many streams that their caller does not open."""
    ends = threading.Event()
    streams = [stub.Execute(_nothing_until(ends), timeout=PATIENCE) for _ in range(count)]
    try:
        yield streams
    finally:
        ends.set()
        for stream in streams:
            stream.cancel()


def _nothing_until(ends: threading.Event) -> Iterator[pb.ExecuteRequest]:
    ends.wait()
    yield from ()


def test_a_stream_that_is_not_opened_ends_with_a_sentence(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hello, "OPENING_S", 0.2)
    with (
        grpc.insecure_channel(server.target) as channel,
        silent(experts_pb2_grpc.ExpertsStub(channel), 1) as (stream,),
        pytest.raises(grpc.RpcError) as ended,
    ):
        next(stream)
    assert (ended.value.code(), reason(ended.value)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "NOT_OPENED")
    assert execute(server, opening())[0].HasField("opened")


def test_streams_of_experts_leave_room_for_other_calls(tiny_model: Path) -> None:
    with serving(tiny_model, experts_api=True, max_rpcs=8) as server, grpc.insecure_channel(server.target) as channel:
        with silent(experts_pb2_grpc.ExpertsStub(channel), 12):
            full = until(lambda: _refused(server), "two streams are waited for")
            assert (full.code(), reason(full)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert server.client.complete(generate_request("a", max_tokens=2)).text is not None
        until(lambda: _refused(server) is None, "they have gone")


def _refused(server: Serving) -> grpc.RpcError | None:
    try:
        execute(server, opening())
    except grpc.RpcError as error:
        return error
    return None


def test_the_digest_is_that_of_the_file_that_was_loaded(tiny_model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.colibri"
    shutil.copyfile(tiny_model, own)
    with serving(own, experts_api=True) as server:
        before = execute(server, opening())[0].opened.model_digest
        own.unlink()
        assert execute(server, opening())[0].opened.model_digest == before
        make_model(own, SHAPES["tiny"], quant="int8", seed=99)
        opened, answer = execute(server, opening(model_digest=before), batch(server))
        assert (opened.opened.model_digest, answer.result.data) == (before, computed_here(server))


def test_a_server_without_the_option_says_how_to(tiny_model: Path) -> None:
    with serving(tiny_model) as other, pytest.raises(grpc.RpcError, match="--experts-api") as refused:
        execute(other, opening())
    assert fields_at_fault(refused.value) == ["model"]
