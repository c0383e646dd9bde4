"""Who runs where: lanes on their node's CPUs, memory of their node, on machines of every shape."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.numa.kernel import Thread, mappings, node_of_cpu, threads
from tests.numa.machine import Machine
from tests.numa.serving import until
from tests.numa.teams import compute, team
from workers.lifecycle import State
from workers.team import Team
from workers.topology import read_topology

pytestmark = pytest.mark.numa("one-node", "two-nodes", "four-nodes", "node-without-memory", "node-without-cpus", "uneven", "smt")


@pytest.fixture(scope="module")
def planned() -> Iterator[Team]:
    """A team of as many workers and lanes as are planned for this machine."""
    with team(workers=None, threads=None) as opened:
        compute(opened)
        yield opened


def cores() -> dict[int, list[int]]:
    """The CPUs that workers' lanes should have, by node: the first of each core, the very first being the front end's."""
    nodes, found = node_of_cpu(), dict[int, list[int]]()
    for core in read_topology().cores[1:]:
        found.setdefault(nodes[core[0]], []).append(core[0])
    return found


def pids(team: Team) -> list[int]:
    """Processes of the workers that compute."""
    workers = team.supervisor.snapshot().workers
    return [worker.pid for worker in workers if worker.pid is not None and worker.state is State.READY]


def by_node(team: Team) -> dict[int, int]:
    """Process of the worker of each node, by the CPUs it may use; there must be one a node."""
    nodes = node_of_cpu()
    found: dict[int, int] = {}
    for pid in pids(team):
        homes = {nodes[cpu] for thread in threads(pid) for cpu in thread.cpus}
        assert len(homes) == 1, f"worker {pid} runs on the nodes {homes}"
        assert found.setdefault(homes.pop(), pid) == pid, "two workers on a node"
    return found


def lanes(pid: int) -> list[Thread]:
    """Threads but the main one, which waits for the supervisor's word."""
    return [thread for thread in threads(pid) if thread.id != pid]


def test_every_node_with_a_core_to_spare_has_one_worker(planned: Team) -> None:
    assert sorted(by_node(planned)) == sorted(cores())


def test_every_lane_is_pinned_to_a_core_of_its_own_on_its_node(planned: Team) -> None:
    for node, pid in by_node(planned).items():
        assert sorted(sorted(lane.cpus) for lane in lanes(pid)) == [[cpu] for cpu in cores()[node]], f"node {node}"


def test_no_thread_of_a_worker_may_leave_its_node(planned: Team) -> None:
    nodes = node_of_cpu()
    for node, pid in by_node(planned).items():
        for thread in threads(pid):
            assert {nodes[cpu] for cpu in thread.cpus} == {node}, thread


def test_workers_ask_for_memory_of_their_node_or_the_nearest_with_some(planned: Team, machine: Machine) -> None:
    with_memory = [node for node, shape in enumerate(machine.nodes) if shape.memory]
    for node, pid in by_node(planned).items():
        policies = {mapping.policy for mapping in mappings(pid).values() if mapping.what == "heap"}
        nearest = min(with_memory, key=lambda other: (other != node, other ^ node != 1, other))
        assert policies == ({f"prefer:{nearest}"} if len(with_memory) > 1 else {"default"}), f"node {node}"


def test_a_restarted_worker_runs_where_the_dead_one_did(planned: Team) -> None:
    before = {node: sorted(sorted(lane.cpus) for lane in lanes(pid)) for node, pid in by_node(planned).items()}
    old = set(pids(planned))
    for pid in old:
        psutil.Process(pid).send_signal(signal.SIGKILL)
    until(lambda: len(set(pids(planned)) - old) == len(old), "all are back")
    assert {node: sorted(sorted(lane.cpus) for lane in lanes(pid)) for node, pid in by_node(planned).items()} == before


def test_nothing_was_refused(planned: Team) -> None:
    assert planned.describe().degraded == ()
