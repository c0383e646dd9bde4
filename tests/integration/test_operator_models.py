"""Several models in one server: loaded, named, swapped and unloaded while requests run."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc

from colibri.v1 import operator_pb2 as op
from ops.random_model import ModelShape, make_model
from service.client import Client, generate_request
from tests.fault.harness import children
from tests.integration.operating import STREAMS, Operating, Streams, operating, undisturbed
from tests.integration.serving import PATIENCE, detail, fields_at_fault, reason, until

TOKENS = 1500
SWAP_MS = 18  # the promise for two models that are loaded


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models whose steps are long enough for streams to outlast what is done meanwhile; they differ in their weights."""
    folder = tmp_path_factory.mktemp("models")
    shape = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, ffn=448, experts=8, top_k=2, vocab=1024, max_context=4096)
    for seed in (1, 2):
        make_model(folder / f"m{seed}.colibri", shape, quant="int8", seed=seed)
    return folder / "m1.colibri", folder / "m2.colibri"


@pytest.fixture
def operated(models: tuple[Path, Path], tmp_path: Path) -> Iterator[Operating]:
    with operating(models[0], tmp_path, name="one", kv_memory=64 << 20) as running:
        yield running


def answer(client: Client, model: str = "") -> tuple[str, tuple[int, ...]]:
    """Which model answered, and what."""
    done = client.complete(generate_request(tokens=[5, 6, 7], model=model, max_tokens=24, temperature=0, ignore_eos=True))
    return done.finish.model, done.token_ids


def refused(call: object) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        call()  # type: ignore[operator]
    return error.value


# ---------------------------------------------------------------- loading and naming


def test_requests_find_the_model_they_name(operated: Operating, models: tuple[Path, Path]) -> None:
    client = operated.serving.client
    one = answer(client)
    operated.load(models[1], "two")
    two = answer(client, "two")
    assert (one[0], two[0]) == ("one", "two")
    assert one[1] != two[1]
    assert answer(client) == answer(client, "one") == answer(client, "default") == one
    assert [model.name for model in client.models()] == ["one", "two"]
    assert [model.is_default for model in client.models()] == [True, False]
    assert client.model("two").name == "two"
    unknown = refused(lambda: answer(client, "three"))
    assert unknown.code() is grpc.StatusCode.NOT_FOUND
    assert "'one', 'two'" in unknown.details()


def test_a_loaded_model_tells_what_it_is(operated: Operating, models: tuple[Path, Path]) -> None:
    loaded = operated.load(models[1], "two", workers_per_node=2, threads_per_worker=1)
    assert (loaded.name, loaded.path, loaded.state) == ("two", str(models[1]), op.MODEL_STATE_READY)
    assert (loaded.workers_ready, loaded.workers_wanted) == (2, 2)
    assert (loaded.quantisation, loaded.kv_bytes) == ("int8", 16 << 20)
    assert [worker.model for worker in operated.workers()] == ["one", "two", "two"]
    assert operated.models()["one"].state == op.MODEL_STATE_SERVING


def test_loading_and_unloading_under_load_fails_no_request_and_changes_no_token(operated: Operating, models: tuple[Path, Path]) -> None:
    expected = undisturbed(operated.serving, TOKENS)
    streams = Streams(operated.serving.target, TOKENS)
    streams.start()
    operated.load(models[1], "two")
    assert answer(operated.serving.client, "two")[0] == "two"
    operated.stub.UnloadModel(op.UnloadModelRequest(name="two"), timeout=PATIENCE)
    operated.load(models[1], "two")
    assert operated.serving.stats().running == STREAMS, "the streams ended too soon"
    assert streams.join() == expected
    assert not streams.errors


# ---------------------------------------------------------------- swapping


def test_a_swap_is_quick_and_sends_new_requests_to_the_new_default(operated: Operating, models: tuple[Path, Path]) -> None:
    operated.load(models[1], "two")
    client = operated.serving.client
    one, two = answer(client, "one"), answer(client, "two")
    took = []
    for name, expected in (("two", two), ("one", one)) * 5:
        took.append(operated.swap(name).swap_ms)
        assert answer(client) == expected
    assert sorted(took)[len(took) // 2] < SWAP_MS


def test_a_swap_under_load_lets_streams_finish_where_they_are(operated: Operating, models: tuple[Path, Path]) -> None:
    expected = undisturbed(operated.serving, TOKENS)
    operated.load(models[1], "two")
    two = answer(operated.serving.client, "two")
    streams = Streams(operated.serving.target, TOKENS)
    streams.start()
    swapped = operated.swap("two")
    assert answer(operated.serving.client) == two
    assert len(operated.serving.server.host.find("one").desk.streams) == STREAMS, "the streams ended too soon"
    assert (swapped.previous, swapped.model.name) == ("one", "two")
    assert swapped.swap_ms < SWAP_MS
    assert streams.join() == expected
    assert not streams.errors
    assert {finish.model for finish in streams.finishes} == {"one"}


def test_swaps_back_and_forth_under_many_requests_fail_none(operated: Operating, models: tuple[Path, Path]) -> None:
    operated.load(models[1], "two")
    client = operated.serving.client
    right = {answer(client, "one"), answer(client, "two")}
    stop = threading.Event()

    def swap_on() -> None:
        while not stop.is_set():
            for name in ("two", "one"):
                operated.swap(name)

    swapper = threading.Thread(target=swap_on)
    swapper.start()
    try:
        seen = {answer(client) for _ in range(200)}
    finally:
        stop.set()
        swapper.join(PATIENCE)
    assert seen == right


def test_swapping_to_the_default_changes_nothing(operated: Operating) -> None:
    assert operated.swap("one").previous == "one"
    assert operated.models()["one"].state == op.MODEL_STATE_SERVING


def test_swapping_to_what_is_not_there_is_refused(operated: Operating) -> None:
    error = refused(lambda: operated.swap("two"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert reason(error) == "UNKNOWN_MODEL"


# ---------------------------------------------------------------- unloading


def test_unloading_waits_for_requests_and_leaves_no_process(operated: Operating, models: tuple[Path, Path]) -> None:
    operated.load(models[1], "two")
    expected = undisturbed(operated.serving, 400, model="two")
    pids = [worker.pid for worker in operated.workers("two")]
    streams = Streams(operated.serving.target, 400, model="two")
    streams.start()
    response = operated.stub.UnloadModel(op.UnloadModelRequest(name="two"), timeout=PATIENCE)
    assert response.broken_off == 0
    assert streams.join() == expected
    assert list(operated.models()) == ["one"]
    assert not [child for child in children() if int(child.split()[0]) in pids]


def test_unloading_breaks_off_what_outlasts_the_grace(operated: Operating, models: tuple[Path, Path]) -> None:
    operated.load(models[1], "two")
    streams = Streams(operated.serving.target, 4000, model="two")
    streams.start()
    response = operated.stub.UnloadModel(op.UnloadModelRequest(name="two", grace_seconds=0.0), timeout=PATIENCE)
    assert response.broken_off == STREAMS
    streams.join()
    assert {error.code() for error in streams.errors} == {grpc.StatusCode.ABORTED}
    assert "was unloaded" in streams.errors[0].details()
    operated.load(models[1], "two")
    assert answer(operated.serving.client, "two")[0] == "two"


def test_a_model_being_unloaded_takes_nothing_new(operated: Operating, models: tuple[Path, Path]) -> None:
    operated.load(models[1], "two")
    streams = Streams(operated.serving.target, 3000, model="two")
    streams.start()
    unloading = operated.stub.UnloadModel.future(op.UnloadModelRequest(name="two"), timeout=PATIENCE)
    until(lambda: operated.models()["two"].state == op.MODEL_STATE_DRAINING, "it drains")
    assert refused(lambda: answer(operated.serving.client, "two")).code() is grpc.StatusCode.NOT_FOUND
    for call in (lambda: operated.swap("two"), lambda: operated.stub.UnloadModel(op.UnloadModelRequest(name="two"), timeout=PATIENCE)):
        error = refused(call)
        assert (error.code(), reason(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_NOT_READY")
    assert unloading.result().broken_off == 0
    assert not streams.errors
    streams.join()


def test_the_default_is_not_unloaded(operated: Operating, models: tuple[Path, Path]) -> None:
    error = refused(lambda: operated.stub.UnloadModel(op.UnloadModelRequest(name="one"), timeout=PATIENCE))
    assert (error.code(), reason(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_IS_DEFAULT")
    operated.load(models[1], "two")
    operated.swap("two")
    operated.stub.UnloadModel(op.UnloadModelRequest(name="one"), timeout=PATIENCE)
    assert answer(operated.serving.client)[0] == "two"


# ---------------------------------------------------------------- what cannot be loaded


def test_a_name_that_is_taken_is_refused(operated: Operating, models: tuple[Path, Path]) -> None:
    error = refused(lambda: operated.load(models[1], "one"))
    assert (error.code(), reason(error)) == (grpc.StatusCode.ALREADY_EXISTS, "MODEL_NAME_TAKEN")


def test_the_word_for_the_default_model_is_no_name(operated: Operating, models: tuple[Path, Path]) -> None:
    error = refused(lambda: operated.load(models[1], "default"))
    assert fields_at_fault(error) == ["name"]
    assert "means the default model" in error.details()
    assert set(operated.models()) == {"one"}


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "torn", "text", "relative"])
def test_a_file_that_is_no_model_is_refused_and_leaves_nothing(
    operated: Operating, models: tuple[Path, Path], tmp_path: Path, damage: str
) -> None:
    data, path = models[1].read_bytes(), tmp_path / "damaged.colibri"
    contents = {"empty": b"", "cut": data[: len(data) // 2], "torn": data[:100] + bytes(64) + data[164:], "text": b"no model at all" * 10}
    if damage in contents:
        path.write_bytes(contents[damage])
    before = children()
    error = refused(lambda: operated.load(Path("m.colibri") if damage == "relative" else path, "two"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields_at_fault(error) == ["path"]
    assert list(operated.models()) == ["one"]
    assert children() == before


def test_a_model_that_does_not_fit_is_refused_before_anything_is_made(operated: Operating, models: tuple[Path, Path]) -> None:
    before = children()
    memory = operated.stub.Topology(op.TopologyRequest(), timeout=PATIENCE).memory_limit_bytes
    request = op.LoadModelRequest(path=str(models[1]), name="two", kv_memory=memory)
    error = refused(lambda: operated.stub.LoadModel(request, timeout=PATIENCE))
    assert (error.code(), reason(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_MEMORY")
    needed, available = (int(detail(error, ErrorInfo).metadata[f"{what}_bytes"]) for what in ("needed", "available"))
    assert available < memory < needed
    assert f"{needed >> 20} MiB" in error.details()
    assert f"{available >> 20} MiB" in error.details()
    assert children() == before


def test_workers_that_do_not_start_leave_nothing(
    operated: Operating, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    monkeypatch.setattr("workers.process.command", lambda *_, **__: ["/bin/false"])
    error = refused(lambda: operated.load(models[1], "two"))
    monkeypatch.undo()
    assert (error.code(), reason(error)) == (grpc.StatusCode.ABORTED, "LOAD_FAILED")
    assert list(operated.models()) == ["one"]
    assert children() == before
    operated.load(models[1], "two")


# ---------------------------------------------------------------- what follows


def test_metrics_are_labelled_by_model_and_go_with_it(models: tuple[Path, Path], tmp_path: Path) -> None:
    with operating(models[0], tmp_path, name="one", metrics_port=0) as running:
        running.load(models[1], "two")
        answer(running.serving.client, "two")
        url = f"http://127.0.0.1:{running.serving.server.metrics.port}/metrics"
        page = urllib.request.urlopen(url, timeout=PATIENCE).read().decode()
        for name in ("vllm:num_requests_running", "colibri_steps_total", "vllm:generation_tokens_total"):
            assert f'{name}{{model_name="one"}}' in page
            assert f'{name}{{model_name="two"}}' in page
        assert 'vllm:generation_tokens_total{model_name="two"} 24.0' in page
        assert page.count("# TYPE colibri_steps_total counter") == 1
        running.stub.UnloadModel(op.UnloadModelRequest(name="two"), timeout=PATIENCE)
        assert '"two"' not in urllib.request.urlopen(url, timeout=PATIENCE).read().decode()


def test_watchers_and_lists_bear_models_that_come_and_go(operated: Operating, models: tuple[Path, Path]) -> None:
    watch = operated.stub.WatchStats(op.WatchStatsRequest(interval_ms=50), timeout=2 * PATIENCE)
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            operated.load(models[1], "two")
            operated.stub.UnloadModel(op.UnloadModelRequest(name="two"), timeout=PATIENCE)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        seen: set[str] = set()
        looks, deadline = 0, time.monotonic() + PATIENCE
        while looks < 40 or (seen != {"one", "two"} and time.monotonic() < deadline):
            looks += 1
            seen |= {stats.model for stats in next(watch).models}
            operated.workers()
            operated.stub.Topology(op.TopologyRequest(), timeout=PATIENCE)
            operated.models()
    finally:
        stop.set()
        thread.join(2 * PATIENCE)
    assert seen == {"one", "two"}


def test_health_is_told_by_model(operated: Operating, models: tuple[Path, Path]) -> None:
    operated.load(models[1], "two")
    serving_now, unknown = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    with grpc.insecure_channel(operated.serving.target) as channel:
        request = health_pb2.HealthCheckRequest(service="colibri.v1.Inference/two")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=PATIENCE)
        while next(watch).status != serving_now:
            pass
        operated.stub.UnloadModel(op.UnloadModelRequest(name="two"), timeout=PATIENCE)
        while next(watch).status != unknown:
            pass
        watch.cancel()


def test_an_operator_who_leaves_does_not_stop_what_it_began(operated: Operating, models: tuple[Path, Path]) -> None:
    call = operated.stub.LoadModel.future(op.LoadModelRequest(path=str(models[1]), name="two", kv_memory=16 << 20), timeout=PATIENCE)
    until(lambda: "two" in operated.models(), "it has begun")
    call.cancel()
    until(lambda: operated.models()["two"].state == op.MODEL_STATE_READY, "it is there all the same")


def test_an_operator_who_leaves_the_queue_takes_its_wish_along(operated: Operating, models: tuple[Path, Path]) -> None:
    host, loop = operated.serving.server.host, operated.serving.loop
    asyncio.run_coroutine_threadsafe(host._one_load.acquire(), loop).result(PATIENCE)
    request = op.LoadModelRequest(path=str(models[1]), name="two", kv_memory=16 << 20)
    call = operated.stub.LoadModel.future(request, timeout=PATIENCE)
    until(lambda: host._changes, "it waits for its turn")
    call.cancel()
    until(lambda: not host._changes, "its wish is dropped")
    loop.call_soon_threadsafe(host._one_load.release)
    operated.load(models[1], "three")
    assert set(operated.models()) == {"one", "three"}


def test_a_model_stays_open_for_what_a_caller_who_has_gone_began(operated: Operating, models: tuple[Path, Path]) -> None:
    operated.load(models[1], "two")
    loop, hosted = operated.serving.loop, operated.serving.server.host.find("two")
    began, end, ended = threading.Event(), threading.Event(), threading.Event()

    def look(_: object) -> None:
        began.set()
        assert end.wait(PATIENCE)
        assert hosted.team.session.telemetry().steps.tolist() == [0] * 4
        ended.set()

    caller = asyncio.run_coroutine_threadsafe(hosted.aside(look), loop)
    assert began.wait(PATIENCE)
    caller.cancel()
    unloading = operated.stub.UnloadModel.future(op.UnloadModelRequest(name="two"), timeout=PATIENCE)
    until(lambda: hosted.closing, "it is being closed")
    assert not unloading.done()
    end.set()
    unloading.result()
    assert ended.is_set()
    assert set(operated.models()) == {"one"}


def test_a_server_stops_cleanly_with_several_models_and_requests(models: tuple[Path, Path], tmp_path: Path) -> None:
    with operating(models[0], tmp_path, name="one", kv_memory=64 << 20) as running:
        running.load(models[1], "two")
        both = [Streams(running.serving.target, 300, model=name) for name in ("one", "two")]
        for streams in both:
            streams.start()
        running.serving.loop.call_soon_threadsafe(running.serving.server.request_stop)
        answers = [streams.join() for streams in both]
        assert all(len(tokens) == 300 for answer_ in answers for tokens in answer_)
        assert not both[0].errors + both[1].errors
        until(running.serving.loop.is_closed, "it has ended")
