"""Nodes and front ends that must not work together: refused in words, on both sides; and what is right goes on beside them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ops.random_model import ModelShape, make_model
from service.wire import PROTOCOL
from tests.fault.harness import limit, wait_for
from tests.fault.load import Answer
from tests.multinode.certificates import Authority, Pair
from tests.multinode.net import Network
from tests.multinode.nodes import PORT, FrontEnd, Node, nodes_of
from tests.multinode.watching import flows, load, undisturbed

pytestmark = pytest.mark.multinode
OTHER_PROTOCOL = """
import sys
import service.wire as wire
wire.PROTOCOL += 1  # before others have read it
from ops.cli import main
sys.argv[0] = "colibri"
main()
"""


def refused(front: FrontEnd, node: Node, *words: str) -> None:
    """The front end says why, in its log and to operators, and does not use the node."""
    address = f"{node.place.address}:{PORT}"

    def told() -> bool:
        found = [known for known in front.nodes().values() if known.address == address]
        return bool(found) and all(word in found[0].reason for word in words)

    wait_for(told, seconds=limit(10), what=f"{address} is refused for {words}")
    line = next(line for line in front.says().splitlines() if address in line and "is refused" in line)
    assert all(word in line for word in words), line


# ---------------------------------------------------------------- models and versions


@dataclass
class Company:
    """One node that is right, one of another model, and one of another protocol; a front end that was given all three."""

    right: Node
    model: Node
    protocol: Node
    front: FrontEnd


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape and name, other weights: only the digest tells."""
    path = tmp_path_factory.mktemp("other") / "small.colibri"
    shape = ModelShape(layers=4, hidden=128, heads=4, kv_heads=2, ffn=192, experts=9, top_k=3, vocab=1024, max_context=1024)
    make_model(path, shape, quant="int8", seed=4)
    return path


@pytest.fixture(scope="module")
def company(network: Network, small_model: Path, other_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    with nodes_of(network, tmp_path_factory.mktemp("company")) as made:
        right = made.node("n1", "--share", "1/1", model=small_model, wait=False)
        model = made.node("n2", "--share", "1/1", model=other_model, wait=False)
        protocol = made.node("n3", "--share", "1/1", model=small_model, main=OTHER_PROTOCOL, wait=False)
        front = made.front([node.place for node in (right, model, protocol)], model=small_model, NODES_FALLBACK="off")
        front.wait_nodes("n1")
        yield Company(right, model, protocol, front)


def test_other_model_is_refused_on_both_sides(company: Company, small_model: Path, other_model: Path) -> None:
    refused(company.front, company.model, "digest", "give both the same file")
    company.model.wait_says("refused", "digest", company.front.place.address, "give both the same file")


def test_other_protocol_is_refused_on_both_sides(company: Company) -> None:
    refused(company.front, company.protocol, f"protocol {PROTOCOL + 1}", "run one release on both")
    company.protocol.wait_says("refused", f"protocol {PROTOCOL}", company.front.place.address, "run the same version on both")


def test_node_that_comes_back_with_another_model_is_refused_until_it_is_the_right_one(
    company: Company, small_model: Path, other_model: Path, expected: list[Answer]
) -> None:
    node, front = company.right, company.front
    before = front.nodes()["n1"].rows
    company.model.kill()
    company.model.command = [str(small_model) if word == str(other_model) else word for word in company.model.command]
    company.model.start()  # the right one now
    front.wait_nodes("n1", "n2")
    with load(front.target, expected) as streams:
        node.kill()
        node.command = [str(other_model) if word == str(small_model) else word for word in node.command]
        node.start()
        node.wait_says("refused", "digest", seconds=10)
        refused(front, node, "digest")
        flows(streams)
        node.kill()
        node.command = [str(small_model) if word == str(other_model) else word for word in node.command]
        node.start()
        front.wait_nodes("n1", "n2")
        wait_for(lambda: front.nodes()["n1"].rows > before, seconds=limit(10), what="n1 computes again")
    undisturbed(streams)


# ---------------------------------------------------------------- certificates


@dataclass
class Secured:
    """Nodes with a certificate of ours, with one of another authority, and without any; and front ends with ours, another, none."""

    ours: Node
    theirs: Node
    plain: Node
    front: FrontEnd
    stranger: FrontEnd
    bare: FrontEnd


@pytest.fixture(scope="module")
def secured(network: Network, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    if shutil.which("openssl") is None:
        pytest.skip("NOT TESTED: nodes over mutual TLS. There is no openssl here to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = Authority.made(folder, "ours"), Authority.made(folder, "theirs")
    names = ",".join(f"IP:{network.place(name).address}" for name in ("t1", "t2", "t3"))
    node, front, enemy = ours.issue("node", names=names), ours.issue("front", names="DNS:front"), theirs.issue("x", names=names)
    stranger = Pair(enemy.certificate, enemy.key, ours.certificate)
    with nodes_of(network, folder) as made:
        nodes = [
            made.node("t1", "--share", "1/1", *node.node, model=small_model, wait=False),
            made.node("t2", "--share", "1/1", *stranger.node, model=small_model, wait=False),
            made.node("t3", "--share", "1/1", model=small_model, wait=False),
        ]
        places = [each.place for each in nodes]
        fronts = [
            made.front(places, model=small_model, name="front", wait=False, **front.front),
            made.front(places[:1], model=small_model, name="stranger", wait=False, **stranger.front),
            made.front(places[:1], model=small_model, name="bare", wait=False),
        ]
        for each in fronts:
            each.wait_ready()
        fronts[0].wait_nodes("t1")
        yield Secured(*nodes, *fronts)


def test_right_certificates_are_let_in(secured: Secured, expected: list[Answer]) -> None:
    with load(secured.front.target, expected) as streams:
        pass
    undisturbed(streams)
    assert secured.front.nodes()["t1"].rows > 0


def test_wrong_certificate_of_a_node_is_refused(secured: Secured) -> None:
    refused(secured.front, secured.theirs, "certificate is not to be trusted", "signed by the authority")
    secured.theirs.wait_says("Handshake failed", seconds=5)


def test_node_without_certificate_is_refused(secured: Secured) -> None:
    refused(secured.front, secured.plain, "does not speak TLS")


def test_wrong_certificate_of_a_front_end_is_refused(secured: Secured) -> None:
    refused(secured.stranger, secured.ours, "certificate", "signed by the authority that the node was started with")
    secured.ours.wait_says("CERTIFICATE_VERIFY_FAILED", seconds=5)


def test_front_end_without_certificate_is_refused(secured: Secured) -> None:
    refused(secured.bare, secured.ours, "asks for TLS", "nodes_cert")
    secured.ours.wait_says("PEER_DID_NOT_RETURN_A_CERTIFICATE", seconds=5)
