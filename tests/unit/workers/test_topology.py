"""What read_topology makes of machines of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.unit.workers.fake_machine import GIB, Machine
from workers.topology import Node, Topology, parse_cpu_list, read_topology


def test_one_node_has_all_memory_whatever_its_meminfo_says(tmp_path: Path) -> None:
    topology = read_topology(Machine(nodes={0: ("0-3", 4 * GIB)}, allowed="0-3", total=24 * GIB).write(tmp_path))
    assert topology.nodes == (Node(0, (0, 1, 2, 3), 24 * GIB),)
    assert topology.memory_limit_bytes == 24 * GIB
    assert topology.memory_available_bytes == 48 * GIB
    assert topology.cpu_quota is None


def test_two_and_four_nodes_are_listed_by_number(tmp_path: Path) -> None:
    two = read_topology(Machine(nodes={1: ("4-7", 32 * GIB), 0: ("0-3", 32 * GIB)}, allowed="0-7").write(tmp_path / "two"))
    assert [node.id for node in two.nodes] == [0, 1]
    assert two.nodes[1] == Node(1, (4, 5, 6, 7), 32 * GIB, 16 * GIB)
    nodes = {number: (f"{2 * i}-{2 * i + 1}", 16 * GIB) for i, number in enumerate((0, 2, 10, 11))}
    four = read_topology(Machine(nodes=nodes, allowed="0-7").write(tmp_path / "four"))
    assert [node.id for node in four.nodes] == [0, 2, 10, 11]
    assert four.nodes[2].cpus == (4, 5)


def test_nodes_without_memory_or_without_cpus(tmp_path: Path) -> None:
    nodes = {0: ("0-1", 32 * GIB), 1: ("2-3", 0), 2: ("", 64 * GIB)}
    topology = read_topology(Machine(nodes=nodes, allowed="0-3").write(tmp_path))
    assert topology.nodes == (Node(0, (0, 1), 32 * GIB, 16 * GIB), Node(1, (2, 3), 0, 0), Node(2, (), 64 * GIB, 32 * GIB))


def test_cpuset_smaller_than_the_machine(tmp_path: Path) -> None:
    nodes = {0: ("0-15", 32 * GIB), 1: ("16-31", 32 * GIB)}
    topology = read_topology(Machine(nodes=nodes, allowed="14-17", mems="1").write(tmp_path))
    assert topology.cpus_allowed == (14, 15, 16, 17)
    assert topology.nodes == (Node(0, (14, 15), 0), Node(1, (16, 17), 32 * GIB, 16 * GIB))


def test_a_kernel_that_shows_no_nodes_is_one_node(tmp_path: Path) -> None:
    topology = read_topology(Machine(nodes={}, allowed="0,2", total=8 * GIB).write(tmp_path))
    assert topology.nodes == (Node(0, (0, 2), 8 * GIB),)


def test_smt_siblings_share_a_core(tmp_path: Path) -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2,6", 6: "2,6"}
    topology = read_topology(Machine(nodes={0: ("0-7", GIB)}, allowed="0-2,4-6", siblings=siblings).write(tmp_path))
    assert topology.cores == ((0, 4), (1, 5), (2, 6))
    assert topology.core_cpus(topology.nodes[0]) == (0, 1, 2)
    assert topology.usable_lanes == 3


def test_a_sibling_that_is_masked_does_not_hide_its_core(tmp_path: Path) -> None:
    siblings = {4: "0,4", 5: "1,5"}
    topology = read_topology(Machine(nodes={0: ("0-7", GIB)}, allowed="4-5", siblings=siblings).write(tmp_path))
    assert topology.core_cpus(topology.nodes[0]) == (4, 5)


def test_this_machine_can_be_read() -> None:
    topology = read_topology()
    assert topology.cpus_allowed
    assert sorted(cpu for node in topology.nodes for cpu in node.cpus) == list(topology.cpus_allowed)
    assert 0 < topology.memory_available_bytes <= topology.memory_limit_bytes


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert parse_cpu_list(",".join(map(str, sorted(cpus))) + "\n") == tuple(sorted(cpus))


def test_cpu_list_ranges_overlap_and_are_empty() -> None:
    assert parse_cpu_list("0-3,2-5,9") == (0, 1, 2, 3, 4, 5, 9)
    assert parse_cpu_list("\n") == ()


@pytest.mark.parametrize("text", ["a", "1-", "-3", "1-x", "0x3"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of CPUs"):
        parse_cpu_list(text)


def test_distances_caches_and_offline_cpus(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    files = {
        "sys/devices/system/node/node0/distance": "10 21 31\n",
        "sys/devices/system/node/node1/distance": "21 10 17\n",
        "sys/devices/system/node/node2/distance": "31 17 10\n",
        f"{cpu}/offline": "4-5\n",
        **{f"{cpu}/cpu{i}/cache/index3/shared_cpu_list": "0-1\n" if i < 2 else "2-3\n" for i in range(4)},
    }
    nodes = {0: ("0-1", GIB), 1: ("2-3", 0), 2: ("", GIB)}
    topology = read_topology(Machine(nodes=nodes, allowed="0-3", files=files).write(tmp_path))
    assert topology.distances == ((10, 21, 31), (21, 10, 17), (31, 17, 10))
    assert topology.l3 == ((0, 1), (2, 3))
    assert topology.offline == (4, 5)
    assert [topology.nearest_memory(node) for node in (0, 1, 2)] == [0, 2, 2]
    assert (topology.distance(0, 2), topology.distance(0, 7), topology.distance(7, 7)) == (31, 20, 10)


def test_distances_that_do_not_fit_the_nodes_are_not_used(tmp_path: Path) -> None:
    files = {"sys/devices/system/node/node0/distance": "10 21\n", "sys/devices/system/node/node1/distance": "21\n"}
    topology = read_topology(Machine(nodes={0: ("0", GIB), 1: ("1", GIB)}, allowed="0-1", files=files).write(tmp_path))
    assert topology.distances == ()
    assert (topology.distance(0, 1), topology.nearest_memory(1)) == (20, 1)


def test_page_cache_of_a_node_counts_as_free(tmp_path: Path) -> None:
    folder = "sys/devices/system/node/node1"
    free = "Node 1 MemFree: 1024 kB\nNode 1 Inactive(file): 2048 kB\nNode 1 Active(file): 2048 kB\nNode 1 SReclaimable: 2048 kB\n"
    files = {f"{folder}/meminfo": f"Node 1 MemTotal: 1048576 kB\n{free}"}
    topology = read_topology(Machine(nodes={0: ("0", GIB), 1: ("1", GIB)}, allowed="0-1", files=files).write(tmp_path))
    assert topology.nodes[1].free_bytes == 5 << 20


def test_no_node_with_memory_is_no_nearest() -> None:
    assert Topology((Node(0, (0,), 0),), (0,), GIB).nearest_memory(0) is None
