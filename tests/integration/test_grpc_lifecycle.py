"""Calls that are broken off: by the client, by a fault, by a signal. Nothing hangs, nothing leaks, the status tells the truth."""

from __future__ import annotations

import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from colibri.v1 import inference_pb2 as pb, inference_pb2_grpc
from engine_c import EngineError
from service.client import Client, generate_request
from service.config import ConfigError
from tests.fault.harness import signalled
from tests.integration.serving import PATIENCE, Serving, reason, retry_seconds, serving, serving_process, until

READINESS = "colibri.v1.Inference"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ENOLANES = -7


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Serving]:
    with serving(tiny_model, lane_grace=0.2) as running:
        yield running


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context that outlasts any buffer."""
    from ops.random_model import SHAPES, make_model

    path = tmp_path_factory.mktemp("long") / "long.colibri"
    make_model(path, replace(SHAPES["tiny"], max_context=1 << 16), quant="int8", seed=1)
    return path


def endless(text: str = "Hello", **how: object) -> pb.GenerateRequest:
    return generate_request(text, **({"max_tokens": 500, "seed": 1, "ignore_eos": True} | how))  # type: ignore[arg-type]


def broken_off(call: Iterable[pb.GenerateResponse]) -> tuple[list[pb.GenerateResponse], grpc.RpcError]:
    """What came of a call, and the error it ended with."""
    events: list[pb.GenerateResponse] = []
    try:
        events.extend(call)
    except grpc.RpcError as error:
        return events, error
    raise AssertionError("the call ended with OK")


# ---------------------------------------------------------------- cancelled by the client


def test_cancel_during_a_step_frees_everything_with_that_step(server: Serving) -> None:
    call = server.client.stub.Generate(endless())
    next(call)
    server.gate.shut()
    until(lambda: server.server.default.engine.progress.busy_since, "a step is under way")
    steps = server.gate.entered
    call.cancel()
    until(lambda: not server.server.default.desk.streams, "the server has noticed")
    server.gate.open()
    server.wait_idle()
    assert server.gate.entered <= steps + 1


def test_cancel_in_the_queue_computes_nothing(server: Serving) -> None:
    server.gate.shut()
    first = server.client.stub.Generate(endless(max_tokens=3))
    until(lambda: server.gate.entered, "a step is under way")
    waiting = server.client.stub.Generate(endless("x " * 50, max_tokens=100))
    until(lambda: len(server.server.default.desk.streams) == 2, "the second is accepted")
    waiting.cancel()
    until(lambda: len(server.server.default.desk.streams) == 1, "the second is gone")
    server.gate.open()
    assert list(first)[-1].finish.usage.completion_tokens == 3
    server.wait_idle()
    assert server.server.default.engine.stats()[1].rows == 5 + 2


def test_many_cancels_leave_no_block_and_no_memory_behind(server: Serving) -> None:
    def cancel_some(count: int) -> None:
        for i in range(count):
            call = server.client.stub.Generate(endless(f"{i} hello"))
            if i % 2:
                next(call)
            call.cancel()

    def burst(count: int) -> int:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(cancel_some, [count // 4] * 4))
        server.wait_idle()
        return psutil.Process().memory_info().rss

    before = burst(800)
    after = burst(1600)
    assert after - before < 24 << 20
    assert server.client.complete(endless(max_tokens=5)).finish.usage.completion_tokens == 5


# ---------------------------------------------------------------- a client that stops reading

SHORT_OF_PATIENCE = {"stream_buffer_tokens": 64, "stream_patience": 0.2, "kv_memory": 64 << 20}


def lazy_channel(server: Serving) -> grpc.Channel:
    """A channel that takes in little of what is not read."""
    return grpc.insecure_channel(server.target, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)])


def test_a_client_that_stops_reading_loses_its_request_and_holds_up_nobody(long_model: Path) -> None:
    with serving(long_model, **SHORT_OF_PATIENCE) as server:
        with lazy_channel(server) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(endless(max_tokens=60_000, top_logprobs=20))
            until(lambda: server.stats().running, "it runs")
            until(lambda: server.stats().running == 0, "it has been called off", timeout=60)
            until(lambda: server.stats().pool.held == 0, "its KV blocks are back")
            assert server.client.complete(endless(max_tokens=5)).finish.usage.completion_tokens == 5
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason(call) == "CLIENT_TOO_SLOW"
        server.wait_idle()


# ---------------------------------------------------------------- faults of the engine


@pytest.mark.parametrize("tokens_before", [0, 3])
def test_an_engine_error_is_a_status_not_an_answer(server: Serving, tokens_before: int) -> None:
    server.gate.fault = lambda step: EngineError(-1, "injected") if step == tokens_before + 1 else None
    events, error = broken_off(server.client.stub.Generate(endless()))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert reason(error) == "ENGINE_EINVAL"
    assert sum(len(event.delta.token_ids) for event in events) == tokens_before
    finishes = [event.finish for event in events if event.HasField("finish")]
    assert [finish.reason for finish in finishes] == ([pb.FINISH_REASON_ABORT] if tokens_before else [])
    assert [finish.usage.completion_tokens for finish in finishes] == ([tokens_before] if tokens_before else [])
    server.wait_idle()
    assert server.client.complete(endless(max_tokens=5)).finish.usage.completion_tokens == 5


def test_lost_lanes_that_come_back_in_time_cost_nothing(server: Serving) -> None:
    expected = server.client.complete(endless(max_tokens=30))
    at = server.gate.entered + 10
    server.gate.fault = lambda step: EngineError(ENOLANES, "injected") if at <= step < at + 3 else None
    again = server.client.complete(endless(max_tokens=30))
    assert (again.text, again.token_ids) == (expected.text, expected.token_ids)


@pytest.mark.parametrize(("at", "code"), [(1, grpc.StatusCode.UNAVAILABLE), (5, grpc.StatusCode.ABORTED)])
def test_lost_lanes_for_good_are_retriable_only_if_nothing_ran(server: Serving, at: int, code: grpc.StatusCode) -> None:
    server.gate.fault = lambda step: EngineError(ENOLANES, "injected") if step >= at else None
    with pytest.raises(grpc.RpcError) as caught:
        server.client.complete(endless())
    assert caught.value.code() is code
    assert reason(caught.value) == "WORKER_LOST"
    until(lambda: readiness(server.target) == NOT_SERVING, "health has looked")
    server.gate.fault = lambda _: None
    assert server.client.complete(endless(max_tokens=5)).finish.usage.completion_tokens == 5
    until(lambda: readiness(server.target) == SERVING, "ready again")
    server.wait_idle()


@pytest.mark.parametrize("front_lane", ["on", "off"])
def test_killed_workers_change_no_token_and_fail_no_stream(tiny_model: Path, server: Serving, front_lane: str) -> None:
    requests = [endless(f"{i} hello", seed=i, max_tokens=200) for i in range(16)]
    alone = [server.client.complete(request) for request in requests]
    with serving(tiny_model, workers_per_node=2, threads_per_worker=1, front_lane=front_lane) as team, ThreadPoolExecutor(16) as pool:
        team.gate.fault = lambda step: kill_one(team, step) if step % 60 == 20 else None
        together = list(pool.map(team.client.complete, requests))
        team.gate.fault = lambda _: None
        restarts = sum(worker.restarts for worker in team.server.default.team.supervisor.snapshot().workers)
        team.wait_idle()
    assert [(a.text, a.token_ids) for a in alone] == [(b.text, b.token_ids) for b in together]
    assert restarts > 0


def kill_one(team: Serving, step: int) -> None:
    """SIGKILL to one of the workers, in turn."""
    pids = [worker.pid for worker in team.server.default.team.supervisor.snapshot().workers if worker.pid]
    if pids:
        signalled(pids[step % len(pids)], signal.SIGKILL)


# ---------------------------------------------------------------- health and metrics


def readiness(target: str, service: str = READINESS) -> int:
    with grpc.insecure_channel(target) as channel:
        return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE).status)


def test_health_knows_its_services_and_no_others(server: Serving) -> None:
    assert readiness(server.target) == SERVING
    assert readiness(server.target, "") == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        readiness(server.target, "other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_watch_tells_of_a_stalled_engine_and_of_its_recovery(tiny_model: Path) -> None:
    with serving(tiny_model, stall_after=0.2) as server, grpc.insecure_channel(server.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS), timeout=PATIENCE)
        assert next(watch).status == SERVING
        server.gate.shut()
        call = server.client.stub.Generate(endless(max_tokens=3))
        assert next(watch).status == NOT_SERVING
        assert readiness(server.target, "") == SERVING
        server.gate.open()
        assert next(watch).status == SERVING
        assert list(call)[-1].finish.usage.completion_tokens == 3
        watch.cancel()


def test_metrics_have_the_names_that_dashboards_read(tiny_model: Path) -> None:
    with serving(tiny_model, metrics_port=0) as server:
        server.client.complete(endless(max_tokens=20))
        values = scraped(server)
        skews = until(lambda: load_of_experts(server), "the experts' counters have been looked at")
    label = f'{{model_name="{server.server.default.model.name}"}}'
    assert float(values["vllm:generation_tokens_total" + label]) == 20
    assert float(values["vllm:prompt_tokens_total" + label]) == 5
    assert float(values["vllm:num_requests_running" + label]) == 0
    assert float(values["vllm:time_to_first_token_seconds_count" + label]) == 1
    assert float(values["colibri_steps_total" + label]) == 20
    assert len(skews) == 3  # layers
    assert all(1 < skew <= 4 for skew in skews)
    for name in ("num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total"):
        assert f"vllm:{name}{label}" in values
    for name in ("inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert f"vllm:{name}_count{label}" in values


def scraped(server: Serving) -> dict[str, str]:
    """Values by name and labels, as Prometheus gets them, which prefers OpenMetrics."""
    accepted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    request = urllib.request.Request(f"http://127.0.0.1:{server.server.metrics.port}/metrics", headers={"Accept": accepted})
    text = urllib.request.urlopen(request, timeout=PATIENCE).read().decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def load_of_experts(server: Serving) -> list[float]:
    """By layer, in the last minute; empty while nothing of it is known."""
    name = re.compile(r'colibri_expert_load_max_over_mean{.*window="60s"}')
    found = [float(value) for sample, value in scraped(server).items() if name.fullmatch(sample)]
    return found if any(skew > 1 for skew in found) else []


def test_a_client_that_pings_often_survives_a_silent_prefill(server: Serving) -> None:
    options = [("grpc.keepalive_time_ms", 200), ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0)]
    with grpc.insecure_channel(server.target, options=options) as channel:
        server.gate.shut()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(endless(max_tokens=3), timeout=PATIENCE)
        assert not threading.Event().wait(2.5)  # the silence itself is what is tested
        server.gate.open()
        assert list(call)[-1].finish.usage.completion_tokens == 3


# ---------------------------------------------------------------- going down


def test_sigterm_under_load_fails_no_call_and_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    with serving_process(tiny_model, tmp_path, max_seqs=8) as process, Client(process.target, timeout=PATIENCE) as client:
        children = process.children()
        assert children
        with grpc.insecure_channel(process.target) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS), timeout=PATIENCE)
            assert next(watch).status == SERVING
            calls = [client.stub.Generate(endless(f"{i}", max_tokens=480), timeout=PATIENCE) for i in range(24)]
            for call in calls:
                call.initial_metadata()  # accepted, be it only into the queue
            process.popen.send_signal(signal.SIGTERM)
            assert next(watch).status == NOT_SERVING
            late_codes = [late.code() for late in (client.stub.Generate(endless("late"), timeout=PATIENCE) for _ in range(3))]
            assert set(late_codes) == {grpc.StatusCode.UNAVAILABLE}
            answers = [list(call)[-1].finish for call in calls]
        assert [answer.usage.completion_tokens for answer in answers] == [480] * 24
        assert process.popen.wait(PATIENCE) == 0, process.log.read_text()
        assert not psutil.wait_procs(children, timeout=2)[1]


def test_a_second_sigterm_hurries_and_says_what_ran(long_model: Path, tmp_path: Path) -> None:
    with serving_process(long_model, tmp_path, kv_memory="64M") as process, Client(process.target, timeout=PATIENCE) as client:
        call = client.stub.Generate(endless(max_tokens=60_000))
        next(call)
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: b"draining" in process.log.read_bytes(), "it drains")
        process.popen.send_signal(signal.SIGTERM)
        events, error = broken_off(call)
        assert error.code() is grpc.StatusCode.ABORTED
        assert reason(error) == "SHUTDOWN"
        assert events[-1].finish.reason == pb.FINISH_REASON_ABORT
        assert process.popen.wait(PATIENCE) == 0


def test_a_client_that_does_not_read_cannot_hold_up_the_shutdown(long_model: Path) -> None:
    with serving(long_model, drain_grace=0.2, **SHORT_OF_PATIENCE) as server, lazy_channel(server) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(endless(max_tokens=60_000, top_logprobs=20))
        until(lambda: server.stats().running, "it runs")
        until(lambda: server.stats().running == 0, "it has been called off", timeout=60)
        assert server.server.default.desk.calls == 1
        started = time.monotonic()
        server.loop.call_soon_threadsafe(server.server.request_stop)
        until(server.loop.is_closed, "the server has stopped", timeout=5)
        assert time.monotonic() - started < 5
        broken_off(call)


def test_the_grace_ends_what_is_left(long_model: Path) -> None:
    with serving(long_model, drain_grace=0.2, kv_memory=64 << 20) as server:
        call = server.client.stub.Generate(endless(max_tokens=60_000))
        next(call)
        server.gate.shut()
        waiting = server.client.stub.Generate(endless("waits"))
        until(lambda: len(server.server.default.desk.streams) == 2, "both are accepted")
        server.loop.call_soon_threadsafe(server.server.request_stop)
        for broken, code in ((call, grpc.StatusCode.ABORTED), (waiting, grpc.StatusCode.UNAVAILABLE)):
            with pytest.raises(grpc.RpcError):
                list(broken)
            assert broken.code() is code
        assert retry_seconds(waiting) > 0


def test_a_port_that_is_taken_is_one_clear_error_and_leaves_nothing(tiny_model: Path, server: Serving) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=r"cannot listen on .*choose another port"), serving(tiny_model, port=server.server.port):
        pass
    until(lambda: threading.active_count() <= threads, "its threads have ended")


@pytest.mark.parametrize("cut", [0, 10, 64, 200, -1])
def test_a_truncated_model_is_one_clear_error(tiny_model: Path, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.colibri"
    path.write_bytes(tiny_model.read_bytes()[:cut])
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"cut\.colibri"), serving(path):
        pass
    assert time.monotonic() - started < 5


def test_a_model_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.colibri: cannot be read"), serving(tmp_path / "none.colibri"):
        pass
