"""Faults of nodes and of the network under load: no wrong token, and no failed call where another node, or the file, has the experts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from service.client import Client
from tests.fault.harness import limit, wait_for
from tests.fault.load import Answer
from tests.integration.serving import reason
from tests.multinode.net import Network
from tests.multinode.nodes import FrontEnd, Node, Nodes, nodes_of
from tests.multinode.watching import flows, load, requests, right, speed, undisturbed

pytestmark = pytest.mark.multinode
NAMES = ("n1", "n2", "n3")
TWO_THIRDS = {"n1": "0-5", "n2": "3-8", "n3": "0-2,6-8"}
"""Experts of each, so that each expert is on two nodes."""
SPARE_S = 5.0  # to be back to full speed
QUICK = {"NODES_TIMEOUT_MS": "500", "NODES_RESOLVE_S": "0.5"}


@dataclass
class Setting:
    """Three nodes, and two front ends: one may compute from the file what nobody has, the other may not."""

    nodes: dict[str, Node]
    front: FrontEnd
    strict: FrontEnd


def begin(cluster: Nodes, model: Path, experts: dict[str, str]) -> Setting:
    nodes = {name: cluster.node(name, "--experts", held, model=model, wait=False) for name, held in experts.items()}
    for node in nodes.values():
        node.wait_ready()
    places = [node.place for node in nodes.values()]
    front = cluster.front(places, model=model, wait=False, **QUICK)
    strict = cluster.front(places, model=model, name="strict", NODES_FALLBACK="off", LANE_GRACE="3", **QUICK)
    front.wait_ready()
    front.wait_nodes(*NAMES)
    strict.wait_nodes(*NAMES)
    return Setting(nodes, front, strict)


@pytest.fixture(scope="module")
def replicas(network: Network, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Each expert on two nodes."""
    with nodes_of(network, tmp_path_factory.mktemp("replicas")) as made:
        yield begin(made, small_model, TWO_THIRDS)


@pytest.fixture(scope="module")
def thirds(network: Network, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Each expert on one node."""
    with nodes_of(network, tmp_path_factory.mktemp("thirds")) as made:
        yield begin(made, small_model, {"n1": "0-2", "n2": "3-5", "n3": "6-8"})


@dataclass(frozen=True)
class Fault:
    """What happens to a node, and how it ends. seen: the front end must notice that it computes no more."""

    strike: Callable[[Network, Node], object]
    mend: Callable[[Network, Node], object]
    seen: bool = True


def _restart(network: Network, node: Node) -> None:
    node.kill()
    node.start()


FAULTS = {
    "killed": Fault(lambda _, node: node.kill(), lambda _, node: node.start()),
    "ended": Fault(lambda _, node: node.terminate(), lambda _, node: node.start()),
    "stopped": Fault(lambda _, node: node.signal(signal.SIGSTOP), lambda _, node: node.signal(signal.SIGCONT)),
    "restarted at once": Fault(_restart, lambda *_: None, seen=False),
    "cut off": Fault(lambda net, node: net.cut(node.place), lambda net, node: net.heal(node.place)),
    "hears nothing": Fault(lambda net, node: net.cut(node.place, back=False), lambda net, node: net.heal(node.place)),
    "is not heard": Fault(lambda net, node: net.cut(node.place, to=False), lambda net, node: net.heal(node.place)),
    "unreachable": Fault(lambda net, node: net.cut(node.place, how="unreachable"), lambda net, node: net.heal(node.place)),
    "on a slow link": Fault(lambda net, node: net.slow(node.place, kbit=500), lambda net, node: net.heal(node.place), seen=False),
}


@pytest.mark.parametrize("what", FAULTS)
def test_fault_of_a_node_with_replicas_costs_nothing(network: Network, replicas: Setting, expected: list[Answer], what: str) -> None:
    fault, node = FAULTS[what], replicas.nodes["n2"]
    with load(replicas.strict.target, expected) as streams:
        try:
            fault.strike(network, node)
            flows(streams)
            if fault.seen:
                wait_for(lambda: "n2" not in replicas.strict.ready(), seconds=limit(5), what="the loss of n2 is seen")
        finally:
            fault.mend(network, node)
        replicas.strict.wait_nodes(*NAMES)
        flows(streams)
    undisturbed(streams)


def test_full_speed_soon_after_a_node_is_back(replicas: Setting, expected: list[Answer]) -> None:
    node = replicas.nodes["n3"]
    with load(replicas.strict.target, expected) as streams:
        usual = max(speed(streams) for _ in range(2))
        node.kill()
        flows(streams)
        node.start()
        node.wait_ready()
        back, rows = time.monotonic(), replicas.strict.nodes()["n3"].rows
        replicas.strict.wait_nodes(*NAMES)
        wait_for(lambda: speed(streams) > 0.8 * usual, seconds=limit(SPARE_S), what=f"as fast as before ({usual:.0f} tokens/s)")
        assert time.monotonic() - back < limit(SPARE_S)
        assert replicas.strict.nodes()["n3"].rows > rows
    undisturbed(streams)


def test_without_replicas_the_file_stands_in(thirds: Setting, expected: list[Answer]) -> None:
    with load(thirds.front.target, expected) as streams:
        thirds.nodes["n1"].kill()
        flows(streams)
        thirds.nodes["n1"].start()
        thirds.front.wait_nodes(*NAMES)
        flows(streams)
    undisturbed(streams)


def test_without_replicas_and_file_a_quick_return_is_waited_for(thirds: Setting, expected: list[Answer]) -> None:
    with load(thirds.strict.target, expected) as streams:
        thirds.nodes["n1"].kill()
        thirds.nodes["n1"].start()
        thirds.strict.wait_nodes(*NAMES)
        flows(streams)
    undisturbed(streams)


def test_without_replicas_and_file_calls_end_typed(thirds: Setting, expected: list[Answer]) -> None:
    with load(thirds.strict.target, expected) as streams:
        thirds.nodes["n2"].kill()
        begin = time.monotonic()
        wait_for(lambda: streams.troubles() > 0, seconds=limit(10), what="calls end")
        with Client(thirds.strict.target, timeout=limit(20)) as client, pytest.raises(grpc.RpcError) as refusal:
            client.complete(requests()[0])
        assert refusal.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
        assert reason(refusal.value) == "NODES_LOST"
        assert time.monotonic() - begin < limit(15)
        thirds.nodes["n2"].start()
        thirds.strict.wait_nodes(*NAMES)
        flows(streams)
    right(streams)
    failed = {error for stream in streams.streams for error in stream.failed}
    assert failed
    assert all(error.startswith(("UNAVAILABLE", "ABORTED")) for error in failed), failed


def test_deadline_of_a_waiting_call_holds(thirds: Setting) -> None:
    thirds.nodes["n3"].signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with Client(thirds.strict.target) as client, pytest.raises(grpc.RpcError) as ended:
            client.complete(requests()[0], timeout=1.0)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - begin < limit(2)
    finally:
        thirds.nodes["n3"].signal(signal.SIGCONT)
    thirds.strict.wait_nodes(*NAMES)


def test_killed_front_end_leaves_nodes_serving_others(thirds: Setting, expected: list[Answer]) -> None:
    """Streams of a front end that is gone are closed: its sockets, and what its batches took."""
    node = thirds.nodes["n1"]
    with load(thirds.front.target, expected) as streams:
        both = node.sockets()
        thirds.strict.kill()
        wait_for(lambda: node.sockets() < both, seconds=limit(5), what="the dead front end's stream is closed")
        flows(streams)
        thirds.strict.start()
        thirds.strict.wait_ready()
        thirds.strict.wait_nodes(*NAMES)
        wait_for(lambda: node.sockets() <= both, seconds=limit(5), what="a stream each front end")
    undisturbed(streams)
