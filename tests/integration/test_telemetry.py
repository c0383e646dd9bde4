"""What operators are told of how experts are used, against what was sent."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from colibri.v1 import inference_pb2 as pb, operator_pb2 as op
from service.client import generate_request
from service.load import SPANS
from service.load_messages import read_load
from tests.integration.operating import Operating, operating
from tests.integration.serving import PATIENCE, Serving, fields_at_fault, serving, until

PROMPT, ANSWER, REQUESTS = 21, 16, 3
ROWS = REQUESTS * (PROMPT + ANSWER - 1)  # the last token of an answer is not run


@pytest.fixture(scope="module")
def operated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operating]:
    with operating(tiny_model, tmp_path_factory.mktemp("telemetry"), metrics_port=0, metrics_experts=True) as running:
        yield running


def ask(server: Serving, *, seed: int) -> None:
    """One request; each with a prompt of its own, for what is in the prefix cache is not run."""
    prompt = [(seed * 131 + 7 * place) % 200 + 3 for place in range(PROMPT)]
    server.client.complete(generate_request(tokens=prompt, max_tokens=ANSWER, temperature=0, ignore_eos=True))


def page(server: Serving) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server.metrics.port}/metrics", timeout=PATIENCE) as response:
        text: str = response.read().decode()
    return text


def samples(text: str, name: str) -> dict[str, float]:
    """Of one metric: labels to value."""
    return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)}


def watch(operated: Operating, **how: object) -> op.ModelStats:
    """The first message: all since the start."""
    messages = operated.stub.WatchStats(op.WatchStatsRequest(interval_ms=50, **how), timeout=PATIENCE)  # type: ignore[arg-type]
    (model,) = next(messages).models
    messages.cancel()
    return model


def test_counts_are_the_tokens_sent_times_the_experts_of_a_token_in_every_layer(operated: Operating) -> None:
    server = operated.serving
    info = server.server.default.model.info
    before = read_load(watch(operated).load)
    pages = samples(page(server), "colibri_routed_tokens_total")
    for seed in range(REQUESTS):
        ask(server, seed=seed)
    load = read_load(watch(operated).load)
    assert (load.rows - before.rows).tolist() == [ROWS] * info.layers
    assert (load.tokens.sum(axis=1) - before.tokens.sum(axis=1)).tolist() == [ROWS * info.top_k] * info.layers
    assert (load.steps - before.steps).tolist() == [int(load.steps[0] - before.steps[0])] * info.layers
    assert load.runs.sum() > 0

    def told() -> float:
        now = samples(page(server), "colibri_routed_tokens_total")
        return sum(now.values()) - sum(pages.values())

    until(lambda: told() == ROWS * info.top_k * info.layers, "the page has it all")
    text = page(server)
    each = samples(text, "colibri_expert_tokens_total")
    assert sum(each.values()) == sum(samples(text, "colibri_routed_tokens_total").values())
    assert len(each) == info.layers * info.experts


def test_moving_windows_hold_what_was_sent_and_let_it_go(operated: Operating) -> None:
    ask(operated.serving, seed=77)
    rows = PROMPT + ANSWER - 1

    def windows() -> list[int]:
        found = watch(operated, windows=[60, 1]).windows
        return [window.layers[0].rows for window in found]

    assert until(lambda: (seen := windows()) and seen[0] >= rows and seen, "the minute has it")
    until(lambda: windows()[1] == 0, "the second has let it go")
    assert windows()[0] >= rows
    for window in watch(operated, windows=[60, 1, 60]).windows:
        assert len(window.layers) == operated.serving.server.default.model.info.layers
    assert len(watch(operated, windows=[60, 1, 60]).windows) == 2


def test_rerouted_tokens_are_those_that_the_answer_counts(operated: Operating) -> None:
    before = read_load(watch(operated).load)
    policy = pb.RoutingPolicy(damping=pb.RoutingPolicy.DAMPING_HEAT, threshold=1, margin=100)
    request = generate_request(tokens=[3] * PROMPT, max_tokens=ANSWER, temperature=0, ignore_eos=True, routing=policy)
    finish = operated.serving.client.complete(request).finish
    after = read_load(watch(operated).load)
    assert finish.rerouted > 0
    assert int((after.rerouted - before.rerouted).sum()) == finish.rerouted
    assert 0 < after.rerouted_share.max() <= 1


@pytest.mark.parametrize("window", [0, 2, 3600])
def test_a_window_that_is_not_kept_is_refused(operated: Operating, window: int) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        watch(operated, windows=[window])
    assert fields_at_fault(refused.value) == ["windows"]


def test_bytes_of_a_step_lie_on_the_node_there_is(operated: Operating) -> None:
    ask(operated.serving, seed=5)
    stats, info = watch(operated).load, operated.serving.server.default.model.info
    machine = operated.stub.Topology(op.TopologyRequest(), timeout=PATIENCE)
    if len(machine.nodes) > 1:
        pytest.skip("NOT TESTED: bytes by node. This machine has several nodes; what one node reads is tested by make test-numa")
    (node,) = stats.nodes
    assert node.node == machine.nodes[0].id
    assert info.expert_bytes * info.top_k / info.experts <= node.step_bytes <= info.expert_bytes
    (placement,) = machine.placements
    assert (placement.layers, placement.experts, placement.experts_per_token) == (info.layers, info.experts, info.top_k)
    assert placement.expert_bytes == info.expert_bytes // info.layers // info.experts
    assert not placement.homes


def test_the_page_grows_with_the_layers_but_not_with_the_experts_unless_asked(operated: Operating, tiny_model: Path) -> None:
    layers = operated.serving.server.default.model.info.layers
    with serving(tiny_model, metrics_port=0) as plain:
        text = until(lambda: 'layer="' in (now := page(plain)) and now, "the counters have been looked at")
    assert "colibri_expert_tokens_total" not in text
    of_layers = [line for line in text.splitlines() if 'layer="' in line]
    assert len(of_layers) == layers * (6 * len(SPANS) + 2)
    assert 'expert="' not in text


# ---------------------------------------------------------------- balance


@pytest.mark.parametrize("dry_run", [True, False])
def test_on_one_node_there_is_nothing_to_balance_and_that_is_said_in_a_sentence(operated: Operating, dry_run: bool) -> None:
    if len(operated.stub.Topology(op.TopologyRequest(), timeout=PATIENCE).nodes) > 1:
        pytest.skip("NOT TESTED: rebalancing on one node. This machine has several")
    ask(operated.serving, seed=9)
    response = operated.stub.Rebalance(op.RebalanceRequest(dry_run=dry_run), timeout=PATIENCE)
    assert "nothing to place" in response.reason
    assert (response.done, response.bytes, len(response.moves), len(response.copies), len(response.dropped)) == (False, 0, 0, 0, 0)
    assert response.max_over_mean_before == response.max_over_mean_after == 1.0


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (op.RebalanceRequest(model="none"), grpc.StatusCode.NOT_FOUND),
        (op.RebalanceRequest(replicas=1025), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_what_cannot_be_balanced_is_refused(operated: Operating, wrong: op.RebalanceRequest, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        operated.stub.Rebalance(wrong, timeout=PATIENCE)
    assert refused.value.code() is code
