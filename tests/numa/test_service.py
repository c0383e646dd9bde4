"""The service on several nodes says what it says on one, whoever dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.client import Client
from tests.fault.harness import alive
from tests.numa.kernel import node_of_cpu, shared_memory, threads
from tests.numa.models import model_path
from tests.numa.serving import PROMPTS, Server, Streams, answer, served, until

pytestmark = pytest.mark.numa("two-nodes", "four-nodes")

TOKENS = 24


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """What one process says, asked one after the other."""
    with served(model_path("tiny"), tmp_path_factory.mktemp("alone"), "--workers-per-node 0") as server, Client(server.target) as client:
        return [answer(client, which, tokens=TOKENS) for which in range(len(PROMPTS))]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(model_path("tiny"), tmp_path, "--workers-per-node 1 --load memfd") as server:
        yield server


def of_node(server: Server, node: int) -> list[int]:
    """Processes of a node's workers."""
    nodes = node_of_cpu()
    return [pid for pid in server.ready() if {nodes[cpu] for cpu in threads(pid)[0].cpus} == {node}]


def test_a_nodes_workers_all_killed_while_streaming_cost_no_token(server: Server, expected: list[tuple[int, ...]]) -> None:
    last = max(node_of_cpu().values())
    with Streams(server.target, expected) as streams:
        streams.more()
        for node in (last, 0, last):
            victims = of_node(server, node)
            assert victims, f"node {node} has no worker"
            for pid in victims:
                psutil.Process(pid).send_signal(signal.SIGKILL)
            streams.more()
            until(lambda node=node: of_node(server, node), f"node {node} has a worker again")
        streams.more()
    assert streams.failures == []


def test_kill_9_of_the_front_end_leaves_nothing_and_a_new_start_works(expected: list[tuple[int, ...]], tmp_path: Path) -> None:
    before, size = shared_memory(), model_path("tiny").stat().st_size
    with served(model_path("tiny"), tmp_path, "--load memfd") as server:
        pids = server.pids()
        assert pids
        assert shared_memory() > before + size, "the copy of the model counts"
        server.popen.kill()
        server.popen.wait()
        seconds = until(lambda: not alive(pids), "all workers are gone")
    until(lambda: shared_memory() < before + size // 4, "all memfds are freed")
    assert seconds < 2.0
    with served(model_path("tiny"), tmp_path) as again, Client(again.target) as client:
        assert answer(client, 3, tokens=TOKENS) == expected[3]
