"""Which CPUs a front end's threads are kept on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from workers.confine import other_cpus, stepping_cpus
from workers.plan import NodeWish, plan_team
from workers.topology import Node, Topology

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
ALONE = """
import os, threading
from workers.confine import FrontThreads
from workers.plan import TeamPlan, WorkerSpec
from workers.topology import read_topology

before = sorted(os.sched_getaffinity(0))
plan = TeamPlan((WorkerSpec(0, 0, (0,), (before[1],)),), before[0], True, 1, 0, tuple(before))
end = threading.Event()
threads = [threading.Thread(target=end.wait) for _ in range(3)]
[thread.start() for thread in threads]
front = FrontThreads()
assert front.keep([(plan, threads[0].native_id)]) == ""
spare = set(before) - set(before[:2]) or {before[0]}
assert os.sched_getaffinity(threads[0].native_id) == {before[0]}
assert all(os.sched_getaffinity(tid) == spare for tid in (threads[1].native_id, threads[2].native_id, os.getpid()))
assert list(read_topology().cpus_allowed) == before
unpinned = TeamPlan((WorkerSpec(0, 0, (0,), ()),), None, True, 1, 0, tuple(before))
assert front.keep([(unpinned, threads[0].native_id)]) == ""
assert all(os.sched_getaffinity(thread.native_id) == set(before) for thread in threads)
end.set()
print("kept")
"""


def machine(*nodes: int, siblings: bool = False) -> Topology:
    """Nodes with so many CPUs each; siblings: the later half of all shares its cores with the first."""
    ends = [sum(nodes[: place + 1]) for place in range(len(nodes))]
    made = [Node(place, tuple(range(end - count, end)), 64 * GIB) for place, (end, count) in enumerate(zip(ends, nodes, strict=True))]
    half = ends[-1] // 2
    cores = tuple((cpu, cpu + half) for cpu in range(half)) if siblings else ()
    return Topology(tuple(made), tuple(range(ends[-1])), 64 * GIB, None, 32 * GIB, cores)


@pytest.mark.parametrize(
    ("topology", "wish", "stepping", "others"),
    [
        (machine(2), NodeWish(), {0}, {0}),
        (machine(4, 4), NodeWish(), {0}, {0}),
        (machine(4), NodeWish(threads=1), {0}, {2, 3}),  # CPUs without a lane
        (machine(4, siblings=True), NodeWish(), {0}, {2, 3}),  # the cores' other halves
        (machine(2), NodeWish(workers=3), {0, 1}, {0, 1}),  # more lanes than cores: none is pinned
        (machine(2), NodeWish(workers=0), {0, 1}, {0, 1}),
    ],
)
def test_other_threads_leave_pinned_lanes_alone(topology: Topology, wish: NodeWish, stepping: set[int], others: set[int]) -> None:
    plan = plan_team(topology, default=wish)
    assert set(stepping_cpus(plan)) == stepping
    assert other_cpus(topology.cpus_allowed, [plan]) == others


def test_where_lanes_have_every_cpu_threads_may_use_all() -> None:
    topology = machine(2)
    assert other_cpus(topology.cpus_allowed, [plan_team(topology, front_lane="off")]) == {0, 1}


def test_the_lanes_of_all_models_are_left_alone() -> None:
    topology = machine(4)
    one, two = (plan_team(topology, default=NodeWish(threads=1)) for _ in range(2))
    other = replace(two, workers=tuple(replace(worker, cpus=(2,)) for worker in two.workers))
    assert other_cpus(topology.cpus_allowed, [one, other]) == {3}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU leaves no choice")
def test_threads_are_put_there_and_let_go_again() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "kept"), done.stderr
