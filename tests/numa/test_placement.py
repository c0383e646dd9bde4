"""Weights, KV memory and lanes are on their nodes by the kernel's own account, and no placement changes a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from tests.numa.kernel import node_of_cpu, threads
from tests.numa.machine import Machine
from tests.numa.teams import Logits, compute, kv_shares, local_share, shares, team, worker_shares
from workers.placement import Placement
from workers.team import Team

pytestmark = pytest.mark.numa("four-nodes")

PLACED: tuple[Placement, ...] = ("experts", "rows", "replicate")
LEAST = 0.99  # of a shard's pages
BALANCING = Path("/proc/sys/kernel/numa_balancing")
IMPATIENCE = {"scan_delay_ms": 1, "scan_period_min_ms": 20, "scan_period_max_ms": 50}  # of the balancing, below


@pytest.fixture(scope="session")
def expected() -> Logits:
    """The logits of one process and one copy that lies anywhere."""
    with team("none") as alone:
        return compute(alone)


@pytest.fixture(params=PLACED, scope="module")
def placed(request: pytest.FixtureRequest) -> Iterator[Team]:
    """A team that is opened for the second time: the file is in the page cache, whose pages lie where the first load ran."""
    with team(request.param) as first:
        once = shares(first.image)
    assert min(once.values()) >= LEAST, f"first load: {once}"
    with team(request.param) as second:
        yield second


def test_every_shard_lies_on_its_node_after_the_first_and_the_second_load(placed: Team, machine: Machine) -> None:
    found = shares(placed.image)
    assert sorted(found) == list(range(len(machine.nodes)))
    assert min(found.values()) >= LEAST, found


def test_the_report_of_the_load_says_what_numa_maps_says(placed: Team) -> None:
    report = placed.image.report
    assert report.degraded == ()
    assert [share.node for share in report.shares] == list(placed.image.placement.nodes)
    for share in report.shares:
        assert share.on_node is not None
        assert share.on_node >= LEAST * share.bytes


def test_shards_are_the_size_they_should_be(placed: Team) -> None:
    plan, size = placed.image.placement, placed.image.bytes
    whole = plan.placement == "replicate"
    for node in plan.nodes:
        wanted = size if whole else size / len(plan.nodes)
        assert plan.bytes_on(node) == pytest.approx(wanted, rel=0.0 if whole else 0.15), f"node {node}"


def test_logits_are_bit_equal_with_0_1_and_2_workers_a_node(
    placed: Team, expected: Logits, record_property: Callable[[str, object], None]
) -> None:
    for workers in (0, 1, 2):
        if workers:
            placed.scale(None, workers=workers, threads=1, timeout=120.0)
        assert np.array_equal(compute(placed), expected), f"{placed.image.placement.placement}, {workers} workers a node"
    local, homed = local_share(placed)
    if placed.image.placement.placement == "replicate":
        assert homed == 0, "every node has every weight, so no task has a home"
        return
    assert local > homed / 4, "no better than chance"
    record_property("tasks done on the node of their weights", f"{local / homed:.0%} of {homed}")


def test_workers_see_the_pages_on_their_nodes_too(placed: Team) -> None:
    for worker in placed.supervisor.snapshot().workers:
        assert worker.pid is not None
        found = worker_shares(worker.pid)
        assert found, "it has mapped nothing that belongs to a node"
        assert min(found.values()) >= LEAST, f"worker {worker.index}: {found}"


def test_replicas_are_read_from_the_own_node_only(placed: Team) -> None:
    if placed.image.placement.placement == "replicate":
        for spec, worker in zip(placed.plan.workers, placed.supervisor.snapshot().workers, strict=True):
            assert worker.pid is not None
            assert list(worker_shares(worker.pid)) == [spec.node]


def test_every_lane_runs_only_on_its_nodes_cpus(placed: Team, machine: Machine) -> None:
    nodes = node_of_cpu()
    workers = placed.supervisor.snapshot().workers
    assert len(workers) == 2 * len(machine.nodes)
    for spec, worker in zip(placed.plan.workers, workers, strict=True):
        assert worker.pid is not None
        for thread in threads(worker.pid):
            assert {nodes[cpu] for cpu in thread.cpus} == {spec.node}, thread


def test_kv_heads_lie_on_their_nodes(placed: Team) -> None:
    found = kv_shares(placed)
    assert len({node for node, _ in found.values()}) == len(placed.image.placement.nodes)
    assert min(share for _, share in found.values()) >= LEAST, found


def test_auto_says_why(machine: Machine) -> None:
    with team("auto") as chosen:
        plan = chosen.image.placement
        assert plan.placement in get_args(Placement)
        assert len(plan.nodes) == len(machine.nodes)
        assert plan.reason


@pytest.fixture
def balancing() -> Iterator[Callable[[int], None]]:
    """Switches the kernel's balancing on (1, looking at pages twenty times a second) and off (0)."""
    for name, value in IMPATIENCE.items():
        Path("/sys/kernel/debug/sched/numa_balancing", name).write_text(str(value))
    before = BALANCING.read_text()

    def switch(on: int) -> None:
        BALANCING.write_text(f"{on}\n")

    yield switch
    BALANCING.write_text(before)


@pytest.mark.parametrize("on", [0, 1])
def test_pages_stay_and_bits_do_not_change_with_numa_balancing(on: int, balancing: Callable[[int], None], expected: Logits) -> None:
    balancing(on)
    with team("rows", workers=1) as placed:
        for _ in range(4):
            assert np.array_equal(compute(placed), expected)
        assert min(shares(placed.image).values()) >= LEAST
        assert min(share for _, share in kv_shares(placed).values()) >= LEAST
