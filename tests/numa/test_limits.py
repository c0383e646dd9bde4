"""Less than the whole machine: cpusets, memory limits, full nodes and refused memory policies. It serves, and says what it lacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from service.client import Client
from tests.numa.groups import entering, group, inside
from tests.numa.kernel import node_of_cpu, threads
from tests.numa.models import MODEL
from tests.numa.serving import PROMPTS, Server, answer, served, until
from tests.numa.teams import Logits, compute, greedy, shares, team
from workers.mapping import PAGE, mapped
from workers.numa import bind_memory
from workers.plan import PlanError
from workers.team import Team, TeamConfig
from workers.topology import read_topology

pytestmark = pytest.mark.numa("four-nodes")

TOKENS = 12
DENY = f"exec {sys.executable} {Path(__file__).with_name('deny.py')}"
OPTIONS = "--load memfd --threads-per-worker 1"


@pytest.fixture(scope="module")
def expected() -> Logits:
    """What one process computes that has the whole machine."""
    with team("none") as alone:
        return compute(alone)


@pytest.fixture(scope="module")
def tokens() -> tuple[int, ...]:
    """What it says."""
    with team("none") as alone:
        return greedy(alone, PROMPTS[1], tokens=TOKENS)


def says(server: Server) -> tuple[int, ...]:
    with Client(server.target) as client:
        return answer(client, 1, tokens=TOKENS)


def test_a_cpuset_smaller_than_the_machine_is_kept_to(tokens: tuple[int, ...], tmp_path: Path) -> None:
    nodes = node_of_cpu()
    with group("small", cpuset_cpus="0-1,3", cpuset_mems="0-1") as small, served(tmp_path, OPTIONS, enter=entering(small)) as server:
        assert says(server) == tokens
        assert len(server.ready()) == 2
        for pid in (server.pid, *server.ready()):
            assert {cpu for thread in threads(pid) for cpu in thread.cpus} <= {0, 1, 3}
        assert {nodes[min(threads(pid)[0].cpus)] for pid in server.ready()} == {0, 1}
        told = server.topology()
        assert list(told.cpus_allowed) == [0, 1, 3]
        assert [node.memory_bytes > 0 for node in told.nodes] == [True, True, False, False]
        (placement,) = told.placements
        assert [shard.node for shard in placement.shards] == [0, 1]
        assert all(shard.local_bytes >= 0.99 * shard.bytes for shard in placement.shards)
        assert list(placement.degraded) == []


def test_a_cpuset_with_one_nodes_memory_uses_all_its_cpus(expected: Logits) -> None:
    with group("one-memory", cpuset_cpus="0-7", cpuset_mems="2") as one, inside(one), team(workers=1) as confined:
        assert np.array_equal(compute(confined), expected)
        assert {spec.node for spec in confined.plan.workers} == {0, 1, 2, 3}
        assert confined.image.placement.placement == "none"
        assert confined.describe().degraded == ()


def test_refused_memory_policies_cost_no_answer_and_are_said_once(tokens: tuple[int, ...], tmp_path: Path) -> None:
    with served(tmp_path, OPTIONS, enter=DENY) as server:
        assert says(server) == tokens
        (placement,) = server.topology().placements
        assert any("mbind" in text for text in placement.degraded)
        assert any("set_mempolicy" in text for text in placement.degraded)
        assert len(set(placement.degraded)) == len(placement.degraded)
        nodes = node_of_cpu()
        before = server.ready()
        for pid in before:
            assert len({nodes[cpu] for thread in threads(pid) for cpu in thread.cpus}) == 1, "pinning was not refused"
        psutil.Process(before[-1]).kill()
        until(lambda: len(server.ready()) == 4 and server.ready() != before, "the killed worker is back")
        log = server.log.read_text()
        assert len([line for line in log.splitlines() if "mbind" in line]) == 1, log
        assert all(log.count(f"set_mempolicy to NUMA node {node}") == 1 for node in range(4)), log


def test_a_memory_limit_is_what_the_topology_knows() -> None:
    with group("little", memory_max="300M") as little, inside(little):
        topology = read_topology()
    assert topology.memory_limit_bytes == 300 << 20
    assert 100 << 20 < topology.memory_available_bytes <= 300 << 20


def test_what_does_not_fit_a_memory_limit_is_refused_with_the_numbers() -> None:
    with group("tight", memory_max="300M") as tight, inside(tight):
        size = read_topology().memory_available_bytes
        config = TeamConfig(load_mode="map", workers_per_node=0, kv_bytes=size + (1 << 20))
        with pytest.raises(PlanError, match=r"KV memory of \d+\.\d MiB is asked for, \d+\.\d MiB is free"):
            Team.open(MODEL, config)


def test_a_node_that_is_full_is_left_out_and_named(expected: Logits) -> None:
    Path("/proc/sys/vm/drop_caches").write_text("1")  # else it counts as free, but nobody who only prefers the node gets it
    with filled(3, leave=48 << 20), team("experts") as placed:
        assert placed.image.placement.nodes == (0, 1, 2)
        assert "node 3" in placed.image.placement.reason
        assert min(shares(placed.image).values()) >= 0.99
        assert np.array_equal(compute(placed), expected)


@contextmanager
def filled(node: int, *, leave: int) -> Iterator[None]:
    """A node's memory is taken but for so many bytes. What ended before may give memory back only now, so that it is looked at again."""
    with ExitStack() as held:
        for _ in range(20):
            free = {there.id: there.free_bytes for there in read_topology().nodes}[node]
            assert free is not None
            if free <= leave + (8 << 20):
                break
            held.enter_context(taken(node, free - leave))
        yield


@contextmanager
def taken(node: int, size: int) -> Iterator[None]:
    """So many bytes of a node's memory are taken."""
    size = size // PAGE * PAGE
    file = os.memfd_create("taken")
    try:
        os.ftruncate(file, size)
        with mapped(file, size, writable=True) as address:
            assert not bind_memory(address, size, node, strictly=False)
        os.posix_fallocate(file, 0, size)
        yield
    finally:
        os.close(file)
