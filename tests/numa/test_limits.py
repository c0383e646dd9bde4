"""Less than the whole machine: cpusets, memory limits, full nodes and refused memory policies. It serves, and says what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from service.client import Client
from tests.numa.groups import group
from tests.numa.image import ROOT
from tests.numa.kernel import node_of_cpu, threads
from tests.numa.models import model_path
from tests.numa.serving import Server, answer, served, until
from tests.numa.teams import compute, shares, team
from workers.mapping import PAGE, mapped
from workers.numa import bind_memory
from workers.topology import read_topology

pytestmark = pytest.mark.numa("four-nodes")

TOKENS = 12
DENY = f"exec {sys.executable} {Path(__file__).with_name('deny.py')}"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ...]:
    """What a server says that has the whole machine."""
    with serving(tmp_path_factory.mktemp("whole"), "exec") as server:
        return says(server)


@contextmanager
def serving(folder: Path, enter: str) -> Iterator[Server]:
    with served(model_path("experts"), folder, "--load memfd --threads-per-worker 1", enter=enter) as server:
        yield server


def says(server: Server) -> tuple[int, ...]:
    with Client(server.target) as client:
        return answer(client, 1, tokens=TOKENS)


def test_a_cpuset_smaller_than_the_machine_is_kept_to(expected: tuple[int, ...], tmp_path: Path) -> None:
    nodes = node_of_cpu()
    with group("small", cpuset_cpus="0-1,3", cpuset_mems="0-1") as enter, serving(tmp_path, enter) as server:
        assert says(server) == expected
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


def test_a_cpuset_with_one_nodes_memory_uses_all_its_cpus(expected: tuple[int, ...], tmp_path: Path) -> None:
    with group("one-memory", cpuset_cpus="0-7", cpuset_mems="2") as enter, serving(tmp_path, enter) as server:
        assert says(server) == expected
        assert len(server.ready()) == 4
        (placement,) = server.topology().placements
        assert placement.placement == "none"
        assert list(placement.degraded) == []


def test_refused_memory_policies_cost_no_answer_and_are_said_once(expected: tuple[int, ...], tmp_path: Path) -> None:
    with serving(tmp_path, DENY) as server:
        assert says(server) == expected
        (placement,) = server.topology().placements
        assert placement.degraded
        assert any("mbind" in text for text in placement.degraded)
        assert len(set(placement.degraded)) == len(placement.degraded)
        nodes = node_of_cpu()
        before = server.ready()
        for pid in before:
            assert len({nodes[cpu] for thread in threads(pid) for cpu in thread.cpus}) == 1, "pinning was not refused"
        psutil.Process(before[-1]).kill()
        until(lambda: len(server.ready()) == 4 and server.ready() != before, "the killed worker is back")
        log = server.log.read_text()
        assert len([line for line in log.splitlines() if "mbind" in line]) == 1, log
        assert all(log.count(f"set_mempolicy to node {node}") == 1 for node in range(4)), log


def test_a_memory_limit_is_what_the_topology_knows() -> None:
    program = "from workers.topology import read_topology as r; t = r(); print(t.memory_limit_bytes, t.memory_available_bytes)"
    with group("little", memory_max="200M") as enter:
        line = f"{enter} {sys.executable} -c '{program}'"
        limit, left = map(int, subprocess.check_output(["/bin/sh", "-c", line], cwd=ROOT, text=True).split())
    assert limit == 200 << 20
    assert 100 << 20 < left < 200 << 20


def test_a_model_that_does_not_fit_a_memory_limit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with group("tiny", memory_max="110M") as enter, pytest.raises(AssertionError) as refused, serving(tmp_path, enter):
        pass
    assert "MiB is free" in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_a_node_that_is_full_is_left_out_and_named() -> None:
    free = {node.id: node.free_bytes for node in read_topology().nodes}
    assert free[3] is not None
    with ExitStack() as stack:
        taken = os.memfd_create("taken")
        stack.callback(os.close, taken)
        size = (free[3] - (48 << 20)) // PAGE * PAGE
        os.ftruncate(taken, size)
        with mapped(taken, size, writable=True) as address:
            assert not bind_memory(address, size, 3, strictly=False)
        os.posix_fallocate(taken, 0, size)
        with team("experts") as placed:
            assert placed.image.placement.nodes == (0, 1, 2)
            assert "node 3" in placed.image.placement.reason
            assert min(shares(placed.image).values()) >= 0.99
            found = compute(placed)
    with team("none") as alone:
        assert np.array_equal(compute(alone), found)
