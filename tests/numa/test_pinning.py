"""Who runs where: lanes on their node's CPUs, memory of their node, on machines of every shape."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.client import Client
from tests.numa.kernel import Thread, mappings, node_of_cpu, threads
from tests.numa.machine import Machine
from tests.numa.models import model_path
from tests.numa.serving import Server, answer, served, until
from workers.topology import read_topology

pytestmark = pytest.mark.numa("one-node", "two-nodes", "four-nodes", "node-without-memory", "node-without-cpus", "uneven", "smt")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(model_path("tiny"), tmp_path_factory.mktemp("serve")) as server:
        with Client(server.target) as client:
            answer(client, 0, tokens=8)
        yield server


def planned() -> dict[int, list[int]]:
    """The CPUs that workers' lanes should have, by node: the first of each core, the very first being the front end's."""
    nodes, found = node_of_cpu(), dict[int, list[int]]()
    for core in read_topology().cores[1:]:
        found.setdefault(nodes[core[0]], []).append(core[0])
    return found


def workers(server: Server) -> dict[int, int]:
    """Process of the worker of each node, by the CPUs it may use; there must be one a node."""
    nodes = node_of_cpu()
    found: dict[int, int] = {}
    for pid in server.ready():
        homes = {nodes[cpu] for thread in threads(pid) for cpu in thread.cpus}
        assert len(homes) == 1, f"worker {pid} runs on the nodes {homes}"
        assert found.setdefault(homes.pop(), pid) == pid, "two workers on a node"
    return found


def lanes(pid: int) -> list[Thread]:
    """Threads but the main one, which waits for the supervisor's word."""
    return [thread for thread in threads(pid) if thread.id != pid]


def test_every_node_with_a_core_to_spare_has_one_worker(server: Server) -> None:
    assert sorted(workers(server)) == sorted(planned())


def test_every_lane_is_pinned_to_a_core_of_its_own_on_its_node(server: Server) -> None:
    for node, pid in workers(server).items():
        assert sorted(sorted(lane.cpus) for lane in lanes(pid)) == [[cpu] for cpu in planned()[node]], f"node {node}"


def test_no_thread_of_a_worker_may_leave_its_node(server: Server) -> None:
    nodes = node_of_cpu()
    for node, pid in workers(server).items():
        for thread in threads(pid):
            assert {nodes[cpu] for cpu in thread.cpus} == {node}, thread


def test_workers_ask_for_memory_of_their_node_or_the_nearest_with_some(server: Server, machine: Machine) -> None:
    with_memory = [node for node, shape in enumerate(machine.nodes) if shape.memory]
    for node, pid in workers(server).items():
        heaps = [mapping for mapping in mappings(pid).values() if mapping.what == "heap"]
        nearest = min(with_memory, key=lambda other: (other != node, other ^ node != 1, other))
        policies = {heap.policy for heap in heaps}
        assert policies == ({f"prefer:{nearest}"} if len(with_memory) > 1 else {"default"}), f"node {node}"


def test_a_restarted_worker_runs_where_the_dead_one_did(server: Server) -> None:
    before = {node: sorted(sorted(lane.cpus) for lane in lanes(pid)) for node, pid in workers(server).items()}
    old = set(server.ready())
    for pid in old:
        psutil.Process(pid).send_signal(signal.SIGKILL)
    until(lambda: len(set(server.ready()) - old) == len(old), "all are back")
    assert {node: sorted(sorted(lane.cpus) for lane in lanes(pid)) for node, pid in workers(server).items()} == before


def test_the_log_names_nothing_refused(server: Server) -> None:
    assert "refused" not in Path(server.log).read_text()
