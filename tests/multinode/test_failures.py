"""Faults of nodes and of the network under load: no wrong token, and no failed call where another node, or the file, has the experts."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from colibri.v1 import operator_pb2 as op
from service.client import Client
from tests.fault.harness import limit, wait_for
from tests.fault.load import Answer
from tests.integration.serving import reason
from tests.multinode import net
from tests.multinode.net import Network
from tests.multinode.nodes import FrontEnd, Node, Nodes, nodes_of
from tests.multinode.watching import flows, load, right, short_requests, speed, undisturbed

pytestmark = pytest.mark.multinode
NAMES = ("n1", "n2", "n3")
TWO_THIRDS = {"n1": "0-5", "n2": "3-8", "n3": "0-2,6-8"}
"""Experts of each, so that each expert is on two nodes."""
METRICS = 9100
SPARE_S = 5.0  # to be back to full speed
QUICK = {"NODES_TIMEOUT_MS": "500", "NODES_RESOLVE_S": "0.5"}


@dataclass
class Setting:
    """Three nodes, and two front ends: one may compute from the file what nobody has, the other may not."""

    model: Path
    cluster: Nodes
    nodes: dict[str, Node]
    front: FrontEnd
    strict: FrontEnd


@contextlib.contextmanager
def setting(folder: Path, model: Path, experts: dict[str, str], **settings: str) -> Iterator[Setting]:
    """In a network of its own. settings: of `front`."""
    with net.network(folder) as network, nodes_of(network, folder) as made:
        nodes = {name: made.node(name, "--experts", held, model=model, wait=False) for name, held in experts.items()}
        for node in nodes.values():
            node.wait_ready()
        places = [node.place for node in nodes.values()]
        front = made.front(places, model=model, wait=False, **QUICK, **settings)
        strict = made.front(places, model=model, wait=False, name="strict", NODES_FALLBACK="off", LANE_GRACE="30", **QUICK)
        for each in (front, strict):
            each.wait_ready()
            each.wait_nodes(*NAMES)
        yield Setting(model, made, nodes, front, strict)


@pytest.fixture(scope="module")
def replicas(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Each expert on two nodes. The front end that may compute by itself hedges."""
    hedging = {"NODES_HEDGE_MS": "30", "METRICS_PORT": str(METRICS)}
    with setting(tmp_path_factory.mktemp("replicas"), small_model, TWO_THIRDS, **hedging) as made:
        yield made


@pytest.fixture(scope="module")
def thirds(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Each expert on one node."""
    with setting(tmp_path_factory.mktemp("thirds"), small_model, {"n1": "0-2", "n2": "3-5", "n3": "6-8"}) as made:
        yield made


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
    "stopped": Fault(lambda _, node: node.signal(signal.SIGSTOP), lambda _, node: node.signal(signal.SIGCONT)),
    "restarted at once": Fault(_restart, lambda *_: None, seen=False),
    "cut off": Fault(lambda net, node: net.cut(node.place), lambda net, node: net.heal(node.place)),
    "hears nothing": Fault(lambda net, node: net.cut(node.place, back=False), lambda net, node: net.heal(node.place)),
    "is not heard": Fault(lambda net, node: net.cut(node.place, to=False), lambda net, node: net.heal(node.place)),
    "unreachable": Fault(lambda net, node: net.cut(node.place, how="unreachable"), lambda net, node: net.heal(node.place)),
    "on a slow link": Fault(lambda net, node: net.slow(node.place, kbit=1000), lambda net, node: net.heal(node.place), seen=False),
}


@pytest.mark.parametrize("what", FAULTS)
def test_fault_of_a_node_with_replicas_costs_nothing(replicas: Setting, expected: list[Answer], what: str) -> None:
    fault, node, network = FAULTS[what], replicas.nodes["n2"], replicas.cluster.network
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


def test_node_that_leaves_says_so_and_costs_nothing(replicas: Setting, expected: list[Answer]) -> None:
    """SIGTERM under load: the front end hears of it."""
    node, front = replicas.nodes["n2"], replicas.strict
    with load(front.target, expected) as streams:
        node.signal(signal.SIGTERM)
        wait_for(lambda: "n2" not in front.ready(), seconds=limit(2), what="n2 is not used any more")
        assert front.nodes()["n2"].state == op.REMOTE_NODE_STATE_DRAINING
        flows(streams)
        assert node.wait() == 0
        node.start()
        front.wait_nodes(*NAMES)
        flows(streams)
    undisturbed(streams)
    assert "is draining: it is shutting down" in front.says()


def hedges(front: FrontEnd) -> int:
    """Batches that were asked of another node too, over all nodes."""
    with front.place.connect("127.0.0.1", METRICS, timeout=5) as connection, connection.makefile("rwb") as page:
        page.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        page.flush()
        return sum(int(float(value)) for value in re.findall(rb"\ncolibri_node_hedges_total{[^}]*} (\S+)", page.read()))


@pytest.mark.parametrize("what", ["stopped", "on a slow link"])
def test_batches_of_a_slow_node_are_asked_of_another(replicas: Setting, expected: list[Answer], what: str) -> None:
    fault, node, front, network = FAULTS[what], replicas.nodes["n1"], replicas.front, replicas.cluster.network
    with load(front.target, expected) as streams:
        before = hedges(front)
        fault.strike(network, node)
        try:
            flows(streams)
            wait_for(lambda: hedges(front) > before, seconds=limit(5), what="batches are hedged")
        finally:
            fault.mend(network, node)
        front.wait_nodes(*NAMES)
        flows(streams)
    undisturbed(streams)
    replicas.strict.wait_nodes(*NAMES)


def test_without_replicas_the_file_stands_in(thirds: Setting, expected: list[Answer]) -> None:
    with load(thirds.front.target, expected) as streams:
        thirds.nodes["n1"].kill()
        flows(streams)
        thirds.nodes["n1"].start()
        thirds.front.wait_nodes(*NAMES)
        flows(streams)
    undisturbed(streams)


def test_without_replicas_and_file_a_return_is_waited_for(thirds: Setting, expected: list[Answer]) -> None:
    """Steps wait for it, and are as fast as before soon after."""
    front, node = thirds.strict, thirds.nodes["n1"]
    with load(front.target, expected) as streams:
        usual = speed(streams)
        node.kill()
        node.start()
        node.wait_ready()
        back = time.monotonic()
        front.wait_nodes(*NAMES)
        wait_for(lambda: speed(streams) > 0.8 * usual, seconds=limit(SPARE_S), what=f"as fast as before ({usual:.0f} tokens/s)")
        assert time.monotonic() - back < limit(SPARE_S)
    undisturbed(streams)


def test_without_replicas_and_file_calls_end_typed(thirds: Setting, expected: list[Answer]) -> None:
    places = [node.place for node in thirds.nodes.values()]
    front = thirds.cluster.front(places, model=thirds.model, name="hasty", NODES_FALLBACK="off", LANE_GRACE="0.5", **QUICK)
    front.wait_nodes(*NAMES)
    with load(front.target, expected) as streams:
        thirds.nodes["n2"].kill()
        begin = time.monotonic()
        wait_for(lambda: streams.troubles() > 0, seconds=limit(10), what="calls end")
        with Client(front.target, timeout=limit(20)) as client, pytest.raises(grpc.RpcError) as refusal:
            client.complete(short_requests()[0])
        assert reason(refusal.value) == "NODES_LOST"
        assert "n2" in str(refusal.value.details())
        assert time.monotonic() - begin < limit(15)
        thirds.nodes["n2"].start()
        front.wait_nodes(*NAMES)
        flows(streams)
    right(streams)
    failed = {error for stream in streams.streams for error in stream.failed}
    assert failed
    assert all(error.startswith(("UNAVAILABLE", "ABORTED")) for error in failed), failed
    front.kill()
    thirds.strict.wait_nodes(*NAMES)


def test_deadline_of_a_waiting_call_holds(thirds: Setting) -> None:
    thirds.nodes["n3"].signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with Client(thirds.strict.target) as client, pytest.raises(grpc.RpcError) as ended:
            client.complete(short_requests()[0], timeout=1.0)
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
        assert both >= 2
        thirds.strict.kill()
        wait_for(lambda: node.sockets() < both, seconds=limit(5), what="the dead front end's stream is closed")
        flows(streams)
        thirds.strict.start()
        thirds.strict.wait_ready()
        thirds.strict.wait_nodes(*NAMES)
        wait_for(lambda: node.sockets() <= both, seconds=limit(5), what="a stream each front end")
    undisturbed(streams)
