"""Damped requests over gRPC: repeatable in scope sequence whatever happens, harmless to others, counted, refused where they must be."""

from __future__ import annotations

import os
import random
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from colibri.v1 import inference_pb2 as pb, operator_pb2 as op
from service.client import Completion, generate_request, route_request
from tests.integration.operating import operating
from tests.integration.serving import Serving, fields_at_fault, serving, until
from workers.lifecycle import State

Policy = pb.RoutingPolicy
HEAT = Policy(damping=Policy.DAMPING_HEAT, threshold=1, margin=100, max_rerouted=0.5)
CAPACITY = Policy(damping=Policy.DAMPING_CAPACITY, capacity_factor=1, margin=100, max_rerouted=0.5)
SEQUENCE = [HEAT, CAPACITY]
BATCH = [
    Policy(damping=Policy.DAMPING_HEAT, scope=Policy.SCOPE_BATCH, threshold=1, margin=100),
    Policy(damping=Policy.DAMPING_CAPACITY, scope=Policy.SCOPE_BATCH, capacity_factor=1, margin=100),
    Policy(damping=Policy.DAMPING_REUSE, margin=100),
]
TOKENS = 60


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Serving]:
    with serving(tiny_model, max_rows=48, max_seqs=16, metrics_port=0) as running:
        yield running


def ask(index: int, policy: Policy | None, *, tokens: int = TOKENS, seed: int | None = None) -> pb.GenerateRequest:
    """One of many different requests."""
    prompt = f"{index} the quick brown fox " * (1 + index % 4)
    return generate_request(
        prompt, max_tokens=tokens, temperature=1.2 if seed is not None else 0.0, seed=seed, ignore_eos=True, routing=policy
    )


def sequence_requests(count: int = 8) -> list[pb.GenerateRequest]:
    return [ask(i, SEQUENCE[i % 2], seed=i if i % 3 else None) for i in range(count)]


def told(answer: Completion) -> tuple[tuple[int, ...], int, int]:
    return answer.token_ids, answer.finish.rerouted, answer.finish.routed


# ---------------------------------------------------------------- what a request gets


def test_damping_changes_routes_and_says_how_many(server: Serving) -> None:
    plain = server.client.complete(ask(0, None))
    assert (plain.finish.rerouted, plain.finish.routed) == (0, 0)
    layers = server.client.model().layers
    for policy in [*SEQUENCE, *BATCH]:
        damped = server.client.complete(ask(0, policy))
        assert damped.finish.routed == layers * (damped.finish.usage.prompt_tokens + TOKENS - 1)
        assert 0 < damped.finish.rerouted <= damped.finish.routed
        assert damped.finish.rerouted <= 0.5 * damped.finish.routed or policy.scope == Policy.SCOPE_BATCH or policy in BATCH
    off = server.client.complete(ask(0, Policy(damping=Policy.DAMPING_OFF)))
    assert told(off) == told(plain)


def test_scope_sequence_gives_the_same_tokens_whatever_else_runs(server: Serving) -> None:
    requests = sequence_requests()
    alone = [told(server.client.complete(request)) for request in requests]
    others = [ask(i, policy) for i, policy in enumerate([None, *BATCH, None, HEAT, CAPACITY, None], start=100)]
    assert len({answer[0] for answer in alone}) == len(alone)
    for seed in range(3):
        mixed = [*requests, *others]
        random.Random(seed).shuffle(mixed)
        with ThreadPoolExecutor(len(mixed)) as pool:
            answers = list(pool.map(server.client.complete, mixed))
        got = {request.SerializeToString(): told(answer) for request, answer in zip(mixed, answers, strict=True)}
        assert [got[request.SerializeToString()] for request in requests] == alone
    server.wait_idle()


def test_undamped_requests_beside_damped_ones_are_what_they_are_alone(server: Serving) -> None:
    plain = [ask(i, None, seed=i) for i in range(6)]
    alone = [server.client.complete(request).token_ids for request in plain]
    damped = [ask(i, policy) for i, policy in enumerate([*SEQUENCE, *BATCH] * 2)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(server.client.complete, [*plain, *damped]))
    assert [answer.token_ids for answer in together[: len(plain)]] == alone


def test_chunks_and_preemption_change_no_damped_token(tiny_model: Path, server: Serving) -> None:
    requests = [ask(i, SEQUENCE[i % 2], tokens=100, seed=i) for i in range(8)]
    alone = [told(server.client.complete(request)) for request in requests]
    with serving(tiny_model, max_rows=11, max_seqs=8, kv_memory=190_000) as tight, ThreadPoolExecutor(8) as pool:
        tight.gate.shut()
        answers = [pool.submit(tight.client.complete, request) for request in requests]
        until(lambda: len(tight.server.default.desk.streams) == len(requests), "all are accepted")
        tight.gate.open()
        assert [told(answer.result()) for answer in answers] == alone
        assert tight.stats().preemptions > 0
        tight.wait_idle()


@pytest.mark.parametrize("front_lane", ["on", "off"])
def test_workers_that_are_killed_change_no_damped_token(tiny_model: Path, server: Serving, front_lane: str) -> None:
    requests = [ask(i, SEQUENCE[i % 2], tokens=300, seed=i) for i in range(4)]
    alone = [told(server.client.complete(request)) for request in requests]
    with serving(tiny_model, workers_per_node=1, threads_per_worker=1, front_lane=front_lane) as running, ThreadPoolExecutor(4) as pool:
        killed: list[int] = []

        def ready() -> list[int]:
            workers = running.server.default.team.supervisor.snapshot().workers
            return [worker.pid for worker in workers if worker.state is State.READY and worker.pid is not None]

        def kill(step: int) -> None:
            """As a step begins, so that some die in it."""
            if step in (50, 120, 230):
                for pid in until(ready, "a worker computes"):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

        running.gate.fault = kill
        assert [told(answer) for answer in pool.map(running.client.complete, requests)] == alone
        assert len(killed) == 3


def test_damped_requests_share_no_prefix(server: Serving) -> None:
    prompt = "a prefix of its own that is longer than some blocks of the cache " * 3
    for policy in (HEAT, HEAT, None, CAPACITY):
        request = generate_request(prompt, max_tokens=5, temperature=0, routing=policy)
        assert server.client.complete(request).finish.usage.cached_tokens == 0
    assert server.client.complete(generate_request(prompt, max_tokens=5, temperature=0)).finish.usage.cached_tokens > 100


def test_a_damped_score_is_counted_and_agrees_with_what_was_generated(server: Serving) -> None:
    prompt = server.client.tokenize("Hello there, how do you do?")
    request = generate_request(tokens=prompt, max_tokens=30, temperature=0, top_logprobs=0, ignore_eos=True, routing=HEAT)
    answer = server.client.complete(request)
    text = [*prompt, *answer.token_ids]
    score = server.client.score(tokens=text, routing=HEAT)
    assert [entry.token.logprob for entry in score.scores][-30:] == [entry.logprob for entry in answer.logprobs]
    assert (score.rerouted, score.routed) == (answer.finish.rerouted, answer.finish.routed)
    plain = server.client.score(tokens=text)
    assert plain.routed == 0
    assert plain.total_logprob != score.total_logprob


# ---------------------------------------------------------------- trailers and metrics


def test_trailers_tell_of_damped_requests_alone(server: Serving) -> None:
    def trailers(policy: Policy | None) -> tuple[dict[str, str], pb.Finish]:
        call = server.client.stub.Generate(ask(3, policy))
        *_, last = call
        return {str(name): str(value) for name, value in call.trailing_metadata()}, last.finish

    damped, finish = trailers(HEAT)
    assert damped["x-rerouted"] == str(finish.rerouted)
    assert float(damped["x-rerouted-share"]) == pytest.approx(finish.rerouted / finish.routed, abs=1e-6)
    plain, _ = trailers(None)
    assert not any(name.startswith("x-rerouted") for name in plain)


def test_metrics_count_pairs(server: Serving) -> None:
    def count(name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server.metrics.port}/metrics") as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    before = count("colibri_rerouted_pairs_total"), count("colibri_damped_pairs_total")
    finish = server.client.complete(ask(5, HEAT)).finish
    after = count("colibri_rerouted_pairs_total"), count("colibri_damped_pairs_total")
    assert (after[0] - before[0], after[1] - before[1]) == (finish.rerouted, finish.routed)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("routing.damping", ask(0, Policy())),
        ("routing.scope", ask(0, BATCH[0], seed=1)),
        ("routing.scope", ask(0, BATCH[2], seed=1)),
        ("routing.margin", ask(0, Policy(damping=Policy.DAMPING_HEAT, margin=-1))),
        ("routing.max_rerouted", ask(0, Policy(damping=Policy.DAMPING_HEAT, max_rerouted=float("nan")))),
    ],
)
def test_a_bad_policy_is_named_and_nothing_runs(server: Serving, field: str, request_: pb.GenerateRequest) -> None:
    before = server.gate.entered
    with pytest.raises(grpc.RpcError) as caught:
        server.client.complete(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields_at_fault(caught.value) == [field]
    assert server.gate.entered == before


# ---------------------------------------------------------------- a model's default


def test_the_default_is_for_requests_that_do_not_say(tiny_model: Path) -> None:
    with serving(tiny_model, damping="capacity,capacity_factor=1,margin=100") as running:
        client = running.client
        assert client.model().routing_default.damping == Policy.DAMPING_CAPACITY
        assert client.model().routing_default.HasField("threshold")
        assert client.complete(ask(0, None)).finish.rerouted > 0
        assert client.complete(ask(0, None, seed=1)).finish.routed == 0
        assert client.complete(ask(0, Policy(damping=Policy.DAMPING_OFF))).finish.routed == 0
        assert client.complete(ask(0, HEAT, seed=1)).finish.routed > 0
        assert client.score("Hello there").routed == 0
        assert client.route(route_request("Hello there")).routed == 0


def test_operators_change_the_default_for_requests_to_come(tiny_model: Path, tmp_path: Path) -> None:
    with operating(tiny_model, tmp_path, workers_per_node=0) as running:
        client, stub = running.serving.client, running.stub
        shown = stub.GetRoutingPolicy(op.GetRoutingPolicyRequest())
        assert (shown.model, shown.policy.damping) == (client.model().name, Policy.DAMPING_OFF)
        running.serving.gate.shut()
        under_way: list[Completion] = []
        thread = threading.Thread(target=lambda: under_way.append(client.complete(ask(0, None))))
        thread.start()
        until(lambda: running.serving.server.default.desk.streams, "it is accepted")
        changed = stub.SetRoutingPolicy(op.SetRoutingPolicyRequest(policy=CAPACITY))
        running.serving.gate.open()
        thread.join()
        assert under_way[0].finish.routed == 0
        assert changed.previous == shown.policy
        assert changed.policy.damping == Policy.DAMPING_CAPACITY
        assert changed.policy.scope == Policy.SCOPE_SEQUENCE
        assert changed.policy.margin == 100
        assert client.model().routing_default == changed.policy
        assert client.complete(ask(0, None)).finish.rerouted > 0
        stub.SetRoutingPolicy(op.SetRoutingPolicyRequest(policy=Policy(damping=Policy.DAMPING_OFF)))
        assert client.complete(ask(0, None)).finish.routed == 0


def test_an_operators_bad_policy_is_named_and_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with operating(tiny_model, tmp_path, workers_per_node=0) as running:
        for policy, field in (
            (None, "policy"),
            (Policy(), "policy.damping"),
            (Policy(damping=Policy.DAMPING_HEAT, decay=2), "policy.decay"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                running.stub.SetRoutingPolicy(op.SetRoutingPolicyRequest(policy=policy))
            assert fields_at_fault(caught.value) == [field]
        with pytest.raises(grpc.RpcError) as caught:
            running.stub.SetRoutingPolicy(op.SetRoutingPolicyRequest(model="other", policy=HEAT))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert running.stub.GetRoutingPolicy(op.GetRoutingPolicyRequest()).policy.damping == Policy.DAMPING_OFF
