"""Nodes come by name: one that the name comes to mean is found and used; and what a share takes of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ops.random_model import ModelShape, make_model
from tests.fault.load import Answer
from tests.multinode.net import Network
from tests.multinode.nodes import PORT, Node, Nodes, nodes_of
from tests.multinode.watching import flows, load, undisturbed

pytestmark = pytest.mark.multinode


@pytest.fixture
def cluster(network: Network, tmp_path: Path) -> Iterator[Nodes]:
    with nodes_of(network, tmp_path) as made:
        yield made


def test_new_node_is_found_by_its_name(cluster: Nodes, network: Network, small_model: Path, expected: list[Answer]) -> None:
    first = cluster.node("n1", "--share", "1/2", model=small_model)
    network.names({"nodes": [first.place]})
    front = cluster.front(f"dns:///nodes:{PORT}", model=small_model, NODES_RESOLVE_S="0.5")
    front.wait_nodes("n1")
    with load(front.target, expected) as streams:
        second = cluster.node("n2", "--share", "2/2", model=small_model)
        network.names({"nodes": [first.place, second.place]})
        front.wait_nodes("n1", "n2")
        flows(streams)
        network.names({"nodes": [second.place]})
        front.wait_nodes("n2")
        flows(streams)
    undisturbed(streams)


def pss(node: Node) -> int:
    """Bytes of a node's processes, what they share counted once."""
    return sum(process.memory_full_info().pss for process in node.tree())


def test_memory_is_that_of_the_share(cluster: Nodes, tmp_path: Path) -> None:
    """Beside what a node takes that holds one expert: less than a tenth more than the further bytes of its share."""
    model = tmp_path / "large.colibri"
    shape = ModelShape(layers=2, hidden=512, heads=4, kv_heads=2, ffn=2048, experts=12, top_k=2, vocab=1024)
    make_model(model, shape, quant="int8", seed=5)
    settings = {"LOAD": "memfd", "WORKERS_PER_NODE": "1"}
    names = ("n1", "n2", "n3")
    nodes = [cluster.node(name, "--share", f"{i}/3", model=model, wait=False, **settings) for i, name in enumerate(names, 1)]
    small = cluster.node("n4", "--experts", "0", model=model, wait=False, **settings)
    for node in (*nodes, small):
        node.wait_ready()
    front = cluster.front([node.place for node in nodes], model=model, NODES_FALLBACK="off")
    front.wait_nodes(*names)
    base, least = pss(small), small.describe().share_bytes
    for node in nodes:
        share = node.describe().share_bytes
        assert share > least
        assert pss(node) - base <= 1.1 * (share - least)
    assert psutil.Process(front.pid).memory_full_info().pss < base + sum(node.describe().share_bytes for node in nodes) // 2
