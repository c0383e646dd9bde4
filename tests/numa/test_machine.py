"""The machines are what they are ordered to be, and the topology read in them says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.numa.machine import MACHINES, Machine
from workers.topology import read_topology

pytestmark = pytest.mark.numa(*MACHINES)


def test_topology_is_what_was_ordered(machine: Machine) -> None:
    topology = read_topology()
    assert [len(node.cpus) for node in topology.nodes] == [node.cpus for node in machine.nodes]
    for node, wanted in zip(topology.nodes, machine.nodes, strict=True):
        size = wanted.memory << 20
        assert (0.8 * size if size else 0) <= node.memory_bytes <= size, f"node {node.id}"
    assert len(topology.cores) == machine.cpus // machine.threads
    assert sorted(cpu for core in topology.cores for cpu in core) == list(range(machine.cpus))


def test_processor_has_avx2_and_no_avx512() -> None:
    flags = set(re.findall(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0].split())
    assert "avx2" in flags
    assert "fma" in flags
    assert not any(flag.startswith("avx512") for flag in flags)
