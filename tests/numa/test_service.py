"""`colibri serve` on several nodes: scaled while streams are read, a node's workers killed, the front end killed. No token differs."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from colibri.v1 import operator_pb2 as op
from service.client import Client
from tests.fault.harness import alive
from tests.numa.kernel import node_of_cpu, shared_memory, threads
from tests.numa.machine import Machine
from tests.numa.models import MODEL
from tests.numa.serving import PROMPTS, Server, Streams, answer, served, until
from tests.numa.teams import greedy, team

pytestmark = pytest.mark.numa("two-nodes", "four-nodes")

TOKENS = 16
PROMISED_S = 2.0  # from the front end's death to the last of its processes


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """What one process says, one prompt after the other."""
    with team("none") as alone:
        return [greedy(alone, prompt, tokens=TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of this file; the last one kills it."""
    with served(tmp_path_factory.mktemp("serve"), "--workers-per-node 1 --threads-per-worker 1 --load memfd") as server:
        yield server


def nodes_of(server: Server) -> dict[int, int]:
    """The node of each worker process, on which all its threads must be."""
    nodes, found = node_of_cpu(), dict[int, int]()
    for pid in server.ready():
        homes = {nodes[cpu] for thread in threads(pid) for cpu in thread.cpus}
        assert len(homes) == 1, f"worker {pid} runs on the nodes {homes}"
        found[pid] = homes.pop()
    return found


def per_node(server: Server) -> dict[int, int]:
    """Workers that compute, by node."""
    return dict(Counter(nodes_of(server).values()))


def wait_for_worker(server: Server, node: int) -> None:
    """Returns when a node has one that computes."""
    until(lambda: node in per_node(server), f"node {node} has a worker again")


def test_the_weights_lie_on_the_nodes_and_operators_are_told(server: Server, machine: Machine) -> None:
    told = server.topology()
    assert [len(node.cpus) for node in told.nodes] == [node.cpus for node in machine.nodes]
    (placement,) = told.placements
    assert [shard.node for shard in placement.shards] == list(range(len(machine.nodes)))
    assert all(shard.local_bytes >= 0.99 * shard.bytes for shard in placement.shards)
    assert sum(shard.bytes for shard in placement.shards) == MODEL.stat().st_size
    assert list(placement.degraded) == []


@pytest.mark.numa("four-nodes")
def test_scaling_from_1_to_3_to_2_workers_a_node_while_streaming_costs_nothing(
    server: Server, machine: Machine, expected: list[tuple[int, ...]]
) -> None:
    every, last = range(len(machine.nodes)), len(machine.nodes) - 1
    with Streams(server.target, expected) as streams:
        streams.more()
        assert per_node(server) == dict.fromkeys(every, 1)
        for workers in (3, 2):
            server.command("scale", "--workers", str(workers))
            assert per_node(server) == dict.fromkeys(every, workers)
            streams.more()
        server.operator.ScaleWorkers(op.ScaleWorkersRequest(node=last, workers=1))
        assert per_node(server) == {node: 1 if node == last else 2 for node in every}
        server.operator.Drain(op.DrainRequest(node=0))
        assert per_node(server) == {node: 1 if node == last else 2 for node in every if node}
        streams.more()
        server.operator.ScaleWorkers(op.ScaleWorkersRequest(workers=1))
        assert per_node(server) == dict.fromkeys(every, 1)
        streams.more()
    assert streams.failures == []


def test_a_nodes_workers_all_killed_while_streaming_cost_no_token(
    server: Server, machine: Machine, expected: list[tuple[int, ...]]
) -> None:
    with Streams(server.target, expected) as streams:
        streams.more()
        for node in (len(machine.nodes) - 1, 0):
            victims = [pid for pid, home in nodes_of(server).items() if home == node]
            assert victims, f"node {node} has no worker"
            for pid in victims:
                psutil.Process(pid).send_signal(signal.SIGKILL)
            streams.more()
            wait_for_worker(server, node)
        streams.more()
    assert streams.failures == []


def test_kill_9_of_the_front_end_leaves_nothing_and_a_new_start_works(
    server: Server, expected: list[tuple[int, ...]], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    pids, size, before = server.pids(), MODEL.stat().st_size, shared_memory()
    assert pids
    server.popen.kill()
    server.popen.wait()
    seconds = until(lambda: not alive(pids), "all workers are gone")
    until(lambda: shared_memory() < before - size, "the memory of the weights is free")
    record_property("from kill -9 of the front end until no process is left", f"{seconds * 1000:.0f} ms")
    assert seconds < PROMISED_S
    with served(tmp_path) as again, Client(again.target) as client:
        assert answer(client, 3, tokens=TOKENS) == expected[3]
