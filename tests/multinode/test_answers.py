"""Three nodes hold a third of the experts each and the front end none: every bit of an answer is as it is without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ops.random_model import ModelShape, make_model
from service.client import Client, generate_request
from tests.fault.load import Answer
from tests.integration.serving import serving
from tests.multinode import net
from tests.multinode.net import Network
from tests.multinode.nodes import FrontEnd, Nodes, nodes_of
from tests.multinode.watching import flows, load, undisturbed

pytestmark = pytest.mark.multinode
NAMES = ("n1", "n2", "n3")
PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 33, 130)]
Told = list[tuple[int, float]]


@dataclass
class Thirds:
    """Nodes with a share each, and a front end that holds no expert and reads none from the file."""

    model: Path
    nodes: Nodes
    front: FrontEnd


def begin(nodes: Nodes, model: Path) -> Thirds:
    made = [nodes.node(name, "--share", f"{i}/3", model=model, wait=False) for i, name in enumerate(NAMES, 1)]
    for node in made:
        node.wait_ready()
    front = nodes.front([node.place for node in made], model=model, wait=False, NODES_FALLBACK="off")
    front.wait_ready()
    front.wait_nodes(*NAMES)
    return Thirds(model, nodes, front)


@pytest.fixture(scope="module")
def thirds(network: Network, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thirds]:
    with nodes_of(network, tmp_path_factory.mktemp("answers")) as made:
        yield begin(made, small_model)


def log_probabilities(target: str) -> list[Told]:
    """Of the 20 likeliest tokens after each token of prompts and of what is said to them: floats, bit by bit."""
    found: list[Told] = []
    with Client(target, timeout=60) as client:
        for prompt in PROMPTS:
            request = generate_request(tokens=prompt, max_tokens=20, temperature=0.0, ignore_eos=True, top_logprobs=20)
            tokens = list(client.complete(request).logprobs)
            if len(prompt) > 1:
                tokens += [score.token for score in client.score(tokens=prompt, top_logprobs=20).scores]
            found.append([(top.token_id, top.logprob) for token in tokens for top in (token, *token.top)])
    return found


def test_shares_are_disjoint_and_complete(thirds: Thirds) -> None:
    held = [{(share.layer, expert) for share in node.describe().shares for expert in share.experts} for node in thirds.nodes.nodes]
    assert sum(map(len, held)) == len(set().union(*held)) == 4 * 9
    assert {len(each) for each in held} == {12}


def same_bits(thirds: Thirds) -> None:
    with serving(thirds.model) as here:
        expected = log_probabilities(here.target)
    assert log_probabilities(thirds.front.target) == expected
    assert all(node.rows > 0 for node in thirds.front.nodes().values())


def test_log_probabilities_are_the_same_bits(thirds: Thirds) -> None:
    same_bits(thirds)


def test_eight_streams_are_answered_the_same_by_all_nodes(thirds: Thirds, expected: list[Answer]) -> None:
    before = {name: node.rows for name, node in thirds.front.nodes().items()}
    with load(thirds.front.target, expected) as streams:
        flows(streams, tokens=1000)
    undisturbed(streams)
    assert all(node.rows > before[name] for name, node in thirds.front.nodes().items())


@pytest.mark.parametrize(
    ("quant", "router"),
    [
        ("bf16", {}),
        ("int4", {"score": "logits", "weight": "sigmoid_chosen", "apply_at": "input"}),  # as Llama 4 has it
    ],
)
def test_other_families_are_the_same_bits(tmp_path: Path, quant: str, router: dict[str, object]) -> None:
    model = tmp_path / "other.colibri"
    shape = ModelShape(layers=3, hidden=96, heads=4, kv_heads=2, ffn=112, experts=6, top_k=2, vocab=512, max_context=512, router=router)
    make_model(model, shape, quant=quant, seed=8)
    with net.network(tmp_path) as network, nodes_of(network, tmp_path) as made:
        same_bits(begin(made, model))
