"""What cannot be served is refused with the right status, naming the field, before anything is computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from colibri.v1 import inference_pb2 as pb
from service.client import chat, generate_request
from tests.integration.serving import PATIENCE, Serving, fields_at_fault, reason, retry_seconds, serving, until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTEXT = 512


@pytest.fixture(scope="module")
def server(tiny_model: object) -> Iterator[Serving]:
    with serving(tiny_model, max_queue=4, max_seqs=2, max_message_bytes=1 << 20) as running:  # type: ignore[arg-type]
        yield running


def refused(server: Serving, request: pb.GenerateRequest, **how: float) -> grpc.RpcError:
    before = server.gate.entered
    with pytest.raises(grpc.RpcError) as caught:
        server.client.complete(request, **how)
    assert server.gate.entered == before
    return caught.value


BAD_REQUESTS = [
    ("input", pb.GenerateRequest()),
    ("text", generate_request("")),
    ("text", generate_request("x" * (CONTEXT * 64 + 1))),
    ("text", generate_request("x" * CONTEXT)),
    ("tokens.ids", generate_request(tokens=[])),
    ("tokens.ids[1]", generate_request(tokens=[1, 512])),
    ("tokens.ids", generate_request(tokens=[1] * CONTEXT)),
    ("chat.messages", generate_request(messages=[])),
    ("chat.messages[1].role", generate_request(messages=[("user", "x"), ("", "y")])),
    ("chat", pb.GenerateRequest(chat=chat([("user", "x" * CONTEXT)]))),
    ("max_tokens", generate_request("x", max_tokens=0)),
    ("max_tokens", generate_request("x", max_tokens=CONTEXT)),
    ("max_tokens", generate_request("x", max_tokens=2**32 - 1)),
    ("sampling.temperature", generate_request("x", temperature=-0.1)),
    ("sampling.temperature", generate_request("x", temperature=float("nan"))),
    ("sampling.temperature", generate_request("x", temperature=float("inf"))),
    ("sampling.top_p", generate_request("x", top_p=0.0)),
    ("sampling.top_p", generate_request("x", top_p=1.5)),
    ("sampling.min_p", generate_request("x", min_p=1.0)),
    ("sampling.min_p", generate_request("x", min_p=-0.5)),
    ("sampling.top_k", generate_request("x", top_k=2**31)),
    ("sampling.repetition_penalty", generate_request("x", repetition_penalty=0.0)),
    ("stop.strings", generate_request("x", stop=["a"] * 17)),
    ("stop.strings[1]", generate_request("x", stop=["a", ""])),
    ("stop.strings[0]", generate_request("x", stop=["é" * 129])),
    ("stop.token_ids", generate_request("x", stop_token_ids=range(65))),
    ("stop.token_ids[0]", generate_request("x", stop_token_ids=[512])),
    ("top_logprobs", generate_request("x", top_logprobs=21)),
    ("stream_interval_ms", pb.GenerateRequest(text="x", stream_interval_ms=1001)),
]


@pytest.mark.parametrize(("field", "request_"), BAD_REQUESTS, ids=[f"{i}-{field}" for i, (field, _) in enumerate(BAD_REQUESTS)])
def test_a_bad_parameter_is_named(server: Serving, field: str, request_: pb.GenerateRequest) -> None:
    error = refused(server, request_)
    assert error.code() is INVALID
    assert fields_at_fault(error) == [field]
    assert field in error.details()
    assert dict(error.trailing_metadata())["x-request-id"]


@pytest.mark.parametrize("tokens", [[5], [1] * (CONTEXT + 1), [1, 600]])
def test_a_bad_score_is_named(server: Serving, tokens: list[int]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.client.score(tokens=tokens)
    assert caught.value.code() is INVALID
    assert fields_at_fault(caught.value)[0].startswith("tokens.ids")


def test_the_longest_prompt_that_fits_is_served(server: Serving) -> None:
    answer = server.client.complete(generate_request(tokens=[1] * (CONTEXT - 1), seed=1, ignore_eos=True))
    assert answer.finish.usage.completion_tokens == 1
    assert len(server.client.score(tokens=[1] * CONTEXT).scores) == CONTEXT - 1


def test_an_unknown_model_is_not_found_by_any_call(server: Serving) -> None:
    stub = server.client.stub
    calls = [
        lambda: list(stub.Generate(generate_request("x", model="gpt"))),
        lambda: stub.Score(pb.ScoreRequest(model="gpt", text="xy")),
        lambda: stub.Tokenize(pb.TokenizeRequest(model="gpt", text="x")),
        lambda: stub.Detokenize(pb.DetokenizeRequest(model="gpt")),
        lambda: stub.GetModel(pb.GetModelRequest(model="gpt")),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert reason(caught.value) == "UNKNOWN_MODEL"
        assert "gpt" in caught.value.details()


def test_token_ids_out_of_the_vocabulary_cannot_be_detokenised(server: Serving) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.client.detokenize([1, 2, 9999])
    assert fields_at_fault(caught.value) == ["token_ids[2]"]


def test_a_message_too_big_is_refused_by_size(server: Serving) -> None:
    assert refused(server, generate_request("x" * (2 << 20))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class Raw:
    """Any bytes as a request to any method."""

    def __init__(self, server: Serving) -> None:
        self._channel = server.client.channel

    def refused(self, method: str, body: bytes, *, kind: str = "unary_unary") -> grpc.RpcError:
        call = getattr(self._channel, kind)(f"/{method}", request_serializer=bytes, response_deserializer=bytes)
        given = iter([body]) if kind == "stream_stream" else body
        with pytest.raises(grpc.RpcError) as caught:
            list(call(given, timeout=PATIENCE))
        return caught.value


UNREADABLE = {
    "not UTF-8": b"\x0a\x02\xff\xfe",
    "overlong UTF-8": b"\x0a\x02\xc0\x80",
    "a surrogate": b"\x0a\x03\xed\xa0\x80",
    "cut off": b"\x0a\x7fabc",
    "endless number": b"\xff" * 12,
    "field 0": b"\x02\x01a",
    "unopened group": b"\x0c",
    "groups too deep": (99 << 3 | 3).to_bytes(2, "little") * 50_000,
}
METHODS = {
    "colibri.v1.Inference/Generate": "unary_stream",
    "colibri.v1.Inference/Score": "unary_unary",
    "colibri.v1.Inference/GetModel": "unary_unary",
    "colibri.v1.Experts/Route": "unary_unary",
    "grpc.health.v1.Health/Check": "unary_unary",
    "grpc.health.v1.Health/Watch": "unary_stream",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "stream_stream",
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_are_the_callers_mistake(
    server: Serving, method: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    error = Raw(server).refused(method, body, kind=METHODS[method])
    assert error.code() is INVALID
    assert reason(error) == "UNREADABLE_REQUEST"
    assert "Traceback" not in caplog.text
    server.wait_idle()


def test_what_a_caller_wrote_is_repeated_to_it_only_in_part(server: Serving) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.client.model("é☃" * 100_000)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(server.client.channel).Check(health_pb2.HealthCheckRequest(service="☃" * 100_000))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_more_than_the_context_can_hold_is_refused_by_count_alone(server: Serving) -> None:
    assert fields_at_fault(refused(server, generate_request(tokens=[512] * 200_000))) == ["tokens.ids"]
    assert fields_at_fault(refused(server, generate_request(messages=[("u", "")] * 20_000))) == ["chat.messages"]
    with pytest.raises(grpc.RpcError) as caught:
        server.client.detokenize([70] * (CONTEXT * 64 + 1))
    assert fields_at_fault(caught.value) == ["token_ids"]
    assert len(server.client.detokenize([70] * (CONTEXT * 64))) == CONTEXT * 64


def test_the_size_of_a_request_is_bounded_by_what_the_model_can_take(tiny_model: Path) -> None:
    with serving(tiny_model) as running:
        limit = running.server.default.model.bounds.message_bytes
        assert limit < 2 << 20
        with pytest.raises(grpc.RpcError) as caught:
            running.client.complete(generate_request("x" * limit))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_overload_is_refused_with_a_time_to_come_back_and_harms_nobody_else(server: Serving) -> None:
    server.gate.shut()
    calls = [server.client.stub.Generate(generate_request(f"{i}", max_tokens=4, seed=i, ignore_eos=True)) for i in range(60)]
    until(lambda: sum(call.done() for call in calls) >= 60 - 2 - 4, "those who do not fit are refused")
    until(lambda: sum(call.done() for call in calls) + len(server.server.default.desk.streams) == 60, "the others are accepted")
    refusals = [call for call in calls if call.done()]
    assert server.stats().waiting <= 4
    server.gate.open()
    answers = [call for call in calls if call not in refusals]
    assert all(list(call)[-1].finish.usage.completion_tokens == 4 for call in answers)
    assert len(answers) >= 4
    for call in refusals:
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason(call) == "QUEUE_FULL"
        assert retry_seconds(call) > 0
    server.wait_idle()


def test_a_deadline_in_the_queue_is_honoured_and_nothing_is_computed(server: Serving) -> None:
    server.gate.shut()
    running = [server.client.stub.Generate(generate_request("runs", max_tokens=4, seed=1, ignore_eos=True)) for _ in range(2)]
    until(lambda: server.gate.entered and server.stats().running, "a step is under way")
    rows = server.server.default.engine.stats()[1].rows
    with pytest.raises(grpc.RpcError) as caught:
        server.client.complete(generate_request("waits " * 20, max_tokens=4), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: server.stats().running + server.stats().waiting <= 2, "the late one has left the queue")
    server.gate.open()
    assert all(list(call)[-1].finish.usage.completion_tokens == 4 for call in running)
    server.wait_idle()
    assert server.server.default.engine.stats()[1].rows - rows <= 2 * (4 + 4)


def test_a_deadline_in_the_middle_of_an_answer_ends_it(server: Serving) -> None:
    server.gate.fault = lambda _: server.gate.shut()  # each step shuts the gate behind it
    try:
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            server.client.complete(generate_request("Hello", max_tokens=400, seed=1, ignore_eos=True), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started < 5
    finally:
        server.gate.fault = lambda _: None
        server.gate.open()
    server.wait_idle()
