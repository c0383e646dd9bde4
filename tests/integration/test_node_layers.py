"""A front end over two node processes with half of the layers each: every token as without them, also when a node dies and returns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from ops.random_model import SHAPES, make_model
from service.client import Client, generate_request
from service.nodes.nodes import Nodes
from tests.integration.serving import PATIENCE, Serving, serving
from tests.integration.test_nodes import NodeProcess, Thirds, Told, free_ports, told, wait_ready

PROMPTS = [range(3, 3 + length) for length in (5, 20, 70, 40)]
HALVES = {"low": "0-1", "high": "2-3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random model with a layer more."""
    path = tmp_path_factory.mktemp("model") / "four.colibri"
    make_model(path, replace(SHAPES["tiny"], layers=4), quant="int8", seed=3)
    return path


@pytest.fixture(scope="module")
def halves(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thirds]:
    folder = tmp_path_factory.mktemp("halves")
    ports = free_ports(2)
    made = Thirds(model, ",".join(f"127.0.0.1:{port}" for port in ports))
    for (name, layers), port in zip(HALVES.items(), ports, strict=True):
        options = ["--name", name, "--layers", layers, "--kv-memory", "64M", "--port", str(port)]
        made.nodes[name] = NodeProcess(name, [sys.executable, "-m", "ops.cli", "node", str(model), *options], folder / f"{name}.log")
        made.nodes[name].start()
    try:
        yield made
    finally:
        for node in made.nodes.values():
            node.kill()


def over(halves: Thirds, **settings: object) -> AbstractContextManager[Serving]:
    """A front end of these nodes."""
    return serving(halves.model, nodes=halves.places, nodes_timeout_ms=1000, **settings)


def nodes_of(front: Serving) -> Nodes:
    nodes = front.server.default.nodes
    assert nodes is not None
    return nodes


def generate(target: str, prompt: range, tokens: int) -> list[int]:
    with Client(target, timeout=PATIENCE) as client:
        answer = client.complete(generate_request(tokens=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True))
        return list(answer.token_ids)


def generate_all(target: str, tokens: int) -> list[list[int]]:
    """Several streams at once."""
    found: list[list[int]] = [[] for _ in PROMPTS]

    def one(index: int) -> None:
        found[index] = generate(target, PROMPTS[index], tokens)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


LONG = 150


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Told]:
    with serving(model) as here:
        return told(here.target)


@pytest.fixture(scope="module")
def long_answers(model: Path) -> list[list[int]]:
    with serving(model) as here:
        return [generate(here.target, prompt, LONG) for prompt in PROMPTS]


def test_layers_on_nodes_change_no_bit_and_cost_two_hops_a_step(
    halves: Thirds, expected: list[Told], long_answers: list[list[int]]
) -> None:
    with over(halves, nodes_fallback="off", nodes_layers="0-3") as front:
        wait_ready(front, *HALVES)
        assert told(front.target) == expected
        assert generate_all(front.target, LONG) == long_answers
        nodes = nodes_of(front)
        steps = front.server.default.engine.steps
        assert nodes.remote.hops.hops == 2 * steps
        assert {member.name: member.record.hops for member in nodes.members} == {"low": steps, "high": steps}
        assert nodes.remote.totals.layers == 0  # none of the experts was asked for by itself
        front.wait_idle()
