"""A front end over a node and something that only says it is one: whatever that answers, no token is wrong and nothing fails that the other
can do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from colibri.v1 import node_pb2
from tests.fault.harness import limit, wait_for
from tests.fault.load import Answer
from tests.multinode.impostor import NONSENSE
from tests.multinode.net import Network
from tests.multinode.nodes import FrontEnd, Node, Nodes, nodes_of
from tests.multinode.processes import Process
from tests.multinode.watching import flows, load, right, undisturbed

pytestmark = pytest.mark.multinode


@dataclass
class Company:
    cluster: Nodes
    node: Node
    front: FrontEnd

    def impostor(self, *words: str) -> Process:
        """Begins to answer so, as a node that holds all experts."""
        place = self.cluster.network.place("n2")
        description = node_pb2.NodeDescription.FromString(self.node.describe().SerializeToString())
        description.name, description.instance = "n2", "1"
        path = self.cluster.folder / "description"
        path.write_bytes(description.SerializeToString())
        command = [sys.executable, "-m", "tests.multinode.impostor", str(path), *words]
        return self.cluster.begin(Process(place, command, self.cluster.folder / "n2.log"))


@pytest.fixture(scope="module")
def company(network: Network, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    with nodes_of(network, tmp_path_factory.mktemp("impostor")) as made:
        node = made.node("n1", "--share", "1/1", model=small_model, wait=False)
        places = [node.place, network.place("n2")]
        settings = {"NODES_FALLBACK": "off", "NODES_TIMEOUT_MS": "300", "LANE_GRACE": "30"}
        front = made.front(places, model=small_model, **settings)
        front.wait_nodes("n1")
        yield Company(made, node, front)


def test_nonsense_is_found_out_and_the_other_node_asked(company: Company, expected: list[Answer]) -> None:
    words = [*(word for word in NONSENSE if word != "nan"), "ends", "aborts"]
    impostor = company.impostor(*words)
    try:
        with load(company.front.target, expected) as streams:
            wait_for(lambda: set(words) <= set(impostor.says().splitlines()), seconds=limit(30), what="all nonsense was said")
            flows(streams)
        undisturbed(streams)
    finally:
        impostor.kill()
    company.front.wait_nodes("n1")
    said = company.front.says()
    for sentence in ("it answered 4 bytes for", "it answered 0 bytes for", "it failed a batch: no no", "it did not answer for 0.3 s"):
        assert sentence in said
    assert len(said) < 200_000, "what others say is not all logged"


def test_answers_that_are_no_numbers_end_calls_and_change_no_token(company: Company, expected: list[Answer]) -> None:
    impostor = company.impostor("nan")
    try:
        company.front.wait_nodes("n1", "n2")
        with load(company.front.target, expected, begun=False) as streams:
            wait_for(lambda: any(stream.failed for stream in streams.streams), seconds=limit(10), what="calls end")
            impostor.kill()
            company.front.wait_nodes("n1")
            flows(streams)
        right(streams)
        failed = {error for stream in streams.streams for error in stream.failed}
        assert all("layer" in error for error in failed), failed
    finally:
        if impostor.running:
            impostor.kill()
