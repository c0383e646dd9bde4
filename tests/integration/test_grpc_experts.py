"""Experts.Route over gRPC: what the engine routed, whole and in order, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from colibri.v1 import experts_pb2 as pb, inference_pb2
from ops.logits import compute_logits
from ops.random_model import ModelShape, make_model
from ops.route_view import RouteTable
from ops.routes import compute_routes
from service.client import chat, generate_request, route_request
from tests.integration.serving import Serving, fields_at_fault, serving, until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTEXT = 512
TOKENS = [7, 300, 12, 12, 511, 0, 45, 99, 200, 301, 17, 18, 19, 450, 2, 33, 64, 65, 66] * 6
Policy = inference_pb2.RoutingPolicy
DAMPED = Policy(damping=Policy.DAMPING_CAPACITY, capacity_factor=1, margin=100)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Serving]:
    with serving(tiny_model, max_rows=48, max_seqs=8) as running:
        yield running


def route(server: Serving, **what: object) -> RouteTable:
    return RouteTable.of(server.client.route(route_request(**what)))  # type: ignore[arg-type]


def test_routes_are_the_engines_own(server: Serving, tiny_model: Path) -> None:
    expected = compute_logits(tiny_model, tokens=TOKENS, kv_format="bf16")
    found = route(server, tokens=TOKENS)
    assert list(found.answer.token_ids) == TOKENS
    assert list(found.answer.layers) == expected.layers.tolist()
    assert found.experts.tobytes() == expected.experts.tobytes()
    assert found.weights.tobytes() == expected.weights.tobytes()
    np.testing.assert_allclose(found.weights.sum(axis=2), 1, rtol=1e-6)
    assert (np.diff(found.weights, axis=2) <= 0).all(), "the higher the score, the higher the weight"
    assert (found.margins >= 0).all()
    assert np.isfinite(found.margins).all()
    assert found.counts().sum(axis=1).tolist() == [2 * len(TOKENS)] * 3
    assert found.answer.usage.prompt_tokens == len(TOKENS)
    assert (found.answer.rerouted, found.answer.routed) == (0, 0)


def test_the_answer_is_the_same_whatever_else_runs_and_computed_in_process(server: Serving, tiny_model: Path) -> None:
    alone = server.client.route(route_request(tokens=TOKENS))
    others = [generate_request(f"{i} and so on", max_tokens=80, seed=i, ignore_eos=True) for i in range(6)]
    with ThreadPoolExecutor(9) as pool:
        busy = [pool.submit(server.client.complete, request) for request in others]
        again = list(pool.map(server.client.route, [route_request(tokens=TOKENS)] * 3))
        assert all(answer.result().finish.usage.completion_tokens == 80 for answer in busy)
    here = compute_routes(tiny_model, route_request(tokens=TOKENS))
    for answer in (*again, here):
        answer.timings.CopyFrom(alone.timings)
        assert answer == alone
    server.wait_idle()


def test_a_prefix_in_the_cache_is_routed_all_the_same(server: Serving) -> None:
    server.client.complete(generate_request(tokens=TOKENS, max_tokens=2, seed=1))
    assert route(server, tokens=TOKENS).experts.shape == (3, len(TOKENS), 2)


def test_text_tokens_and_chat_are_three_ways_to_the_same_tokens(server: Serving) -> None:
    tokens = server.client.tokenize("Hello there")
    by_text, by_tokens = route(server, text="Hello there"), route(server, tokens=tokens)
    assert by_text.experts.tobytes() == by_tokens.experts.tobytes()
    assert list(by_text.answer.token_ids) == tokens
    assert b"".join(by_text.answer.token_bytes) == b"Hello there"
    by_chat = route(server, messages=[("user", "Hello there")])
    assert list(by_chat.answer.token_ids) == list(server.client.tokenize_chat([("user", "Hello there")]).token_ids)


def test_layers_can_be_chosen(server: Serving) -> None:
    whole, some = route(server, tokens=TOKENS), route(server, tokens=TOKENS, layers=[2, 0])
    assert list(some.answer.layers) == [2, 0]
    for part, of in ((some.experts, whole.experts), (some.weights, whole.weights), (some.margins, whole.margins)):
        assert part.tobytes() == of[[2, 0]].tobytes()


def test_damping_shows_in_the_routes_and_is_counted(server: Serving, tiny_model: Path) -> None:
    plain, damped = route(server, tokens=TOKENS), route(server, tokens=TOKENS, routing=DAMPED)
    assert damped.answer.routed == 3 * len(TOKENS)
    first = np.any(np.sort(plain.experts[0], axis=1) != np.sort(damped.experts[0], axis=1), axis=1).sum()
    assert 0 < first < damped.answer.rerouted, "the first layer sees the same input; later ones also change by what came before"
    assert damped.margins[0].tobytes() == plain.margins[0].tobytes(), "margins are of undamped scores"
    here = compute_routes(tiny_model, route_request(tokens=TOKENS, routing=DAMPED))
    assert (here.experts, here.rerouted, here.routed) == (damped.answer.experts, damped.answer.rerouted, damped.answer.routed)


def test_margins_are_infinite_where_every_expert_is_chosen(container: Callable[[str, str], Path]) -> None:
    with serving(container("all-experts", "int8")) as running:
        assert np.isposinf(route(running, tokens=[1, 2, 3]).margins).all()


BAD_REQUESTS = [
    ("input", pb.RouteRequest()),
    ("text", route_request("")),
    ("text", route_request("x" * (CONTEXT * 64 + 1))),
    ("text", route_request("x" * (CONTEXT + 1))),
    ("tokens.ids", route_request(tokens=[])),
    ("tokens.ids", route_request(tokens=[1] * (CONTEXT + 1))),
    ("tokens.ids[1]", route_request(tokens=[1, 512])),
    ("chat.messages", pb.RouteRequest(chat=chat([]))),
    ("layers[0]", route_request("x", layers=[3])),
    ("layers[1]", route_request("x", layers=[1, 1])),
    ("routing.damping", route_request("x", routing=Policy())),
]


@pytest.mark.parametrize(("field", "request_"), BAD_REQUESTS, ids=[f"{i}-{field}" for i, (field, _) in enumerate(BAD_REQUESTS)])
def test_a_bad_parameter_is_named_and_nothing_runs(server: Serving, field: str, request_: pb.RouteRequest) -> None:
    before = server.gate.entered
    with pytest.raises(grpc.RpcError) as caught:
        server.client.route(request_)
    assert caught.value.code() is INVALID
    assert fields_at_fault(caught.value) == [field]
    assert server.gate.entered == before


def test_the_longest_text_of_the_context_is_routed(server: Serving) -> None:
    assert route(server, tokens=[1] * CONTEXT).experts.shape == (3, CONTEXT, 2)


def test_an_answer_that_clients_would_not_take_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    shape = ModelShape(layers=12, hidden=32, heads=1, kv_heads=1, ffn=32, experts=8, top_k=8, vocab=16, max_context=8192)
    make_model(tmp_path / "deep.colibri", shape)
    with serving(tmp_path / "deep.colibri", max_rows=512) as running:
        most = (4 << 20) // (12 * (8 * 8 + 4))
        tokens = [1] * (most - most // 50)
        with grpc.insecure_channel(running.target) as channel:  # with gRPC's own limit
            ask = channel.unary_unary("/colibri.v1.Experts/Route", pb.RouteRequest.SerializeToString, pb.RouteResponse.FromString)
            assert len(ask(route_request(tokens=tokens)).token_ids) == len(tokens)
            before = running.gate.entered
            with pytest.raises(grpc.RpcError) as caught:
                ask(route_request(tokens=[1] * most))
            assert fields_at_fault(caught.value) == ["tokens.ids"]
            assert running.gate.entered == before
            assert len(ask(route_request(tokens=[1] * most, layers=[3, 4])).token_ids) == most


def test_a_dense_model_has_no_routes_and_cannot_be_damped(container: Callable[[str, str], Path]) -> None:
    with serving(container("dense-llama", "int8"), damping="heat") as running:
        with pytest.raises(grpc.RpcError) as caught:
            running.client.route(route_request(tokens=[1, 2]))
        assert fields_at_fault(caught.value) == ["model"]
        assert "no router" in caught.value.details()
        with pytest.raises(grpc.RpcError) as caught:
            running.client.complete(generate_request(tokens=[1, 2], max_tokens=2, routing=DAMPED))
        assert fields_at_fault(caught.value) == ["routing.damping"]
        assert running.client.model().routing_default.damping == Policy.DAMPING_OFF
        assert running.client.complete(generate_request(tokens=[1, 2], max_tokens=2)).finish.routed == 0


def test_an_unknown_model_is_not_found(server: Serving) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.client.route(route_request("x", model="gpt"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_route_can_be_called_off_and_has_a_deadline(server: Serving) -> None:
    server.gate.shut()
    try:
        call = server.client.experts.Route.future(route_request(tokens=TOKENS))
        until(lambda: server.server.default.desk.streams, "it is accepted")
        call.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            server.client.route(route_request(tokens=TOKENS), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        server.gate.open()
    server.wait_idle()


def test_metadata_is_as_of_other_calls(server: Serving) -> None:
    ask = server.client.experts.Route.with_call
    _, call = ask(route_request("Hello", routing=DAMPED), metadata=(("x-request-id", "mine"),))
    trailers = dict(call.trailing_metadata())
    assert dict(call.initial_metadata())["x-request-id"] == trailers["x-request-id"] == "mine"
    assert float(trailers["x-prefill-ms"]) > 0
    assert int(trailers["x-rerouted"]) > 0


def test_health_has_the_service(server: Serving) -> None:
    stub = health_pb2_grpc.HealthStub(server.client.channel)
    for service in ("colibri.v1.Experts", f"colibri.v1.Experts/{server.client.model().name}"):
        status = stub.Check(health_pb2.HealthCheckRequest(service=service)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
