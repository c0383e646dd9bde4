"""Limits of control groups, version 1 and 2, on hosts and in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.workers.fake_machine import GIB, NO_LIMIT_V1, Machine, mount_v1, mount_v2
from workers.cgroup import OomWatch, read_cpu_quota, read_memory
from workers.topology import read_topology

V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
NODES = {0: ("0-7", 64 * GIB)}


def machine(cgroup: str, mounts: list[str], files: dict[str, str]) -> Machine:
    return Machine(nodes=NODES, allowed="0-7", cgroup=cgroup, mounts=mounts, files=files)


def test_v2_takes_the_strictest_level(tmp_path: Path) -> None:
    files = {
        f"{V2}/memory.stat": "",
        f"{V2}/a/memory.max": f"{4 * GIB}\n",
        f"{V2}/a/memory.current": f"{3 * GIB}\n",
        f"{V2}/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        f"{V2}/a/cpu.max": "250000 100000\n",
        f"{V2}/a/b/memory.max": "max\n",
        f"{V2}/a/b/memory.current": "1\n",
        f"{V2}/a/b/memory.events": "low 0\noom 2\noom_kill 7\n",
        f"{V2}/a/b/cpu.max": "max 100000\n",
    }
    root = machine("0::/a/b\n", [mount_v2()], files).write(tmp_path)
    memory = read_memory(root)
    assert (memory.limit_bytes, memory.available_bytes, memory.oom_kills) == (4 * GIB, 2 * GIB, 7)
    assert read_cpu_quota(root) == 2.5
    topology = read_topology(root)
    assert (topology.memory_limit_bytes, topology.memory_available_bytes, topology.usable_lanes) == (4 * GIB, 2 * GIB, 2)


def test_v2_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {f"{V2}/memory.max": f"{GIB}\n", f"{V2}/memory.current": "0\n", f"{V2}/cpu.max": "50000 100000\n"}
    root = machine("0::/\n", [mount_v2("/../../docker/abc")], files).write(tmp_path)
    assert read_memory(root).limit_bytes == GIB
    assert read_cpu_quota(root) == 0.5
    assert read_topology(root).usable_lanes == 1


def test_v1_takes_the_strictest_level_and_ignores_its_no_limit(tmp_path: Path) -> None:
    files = {
        f"{V1}/memory.limit_in_bytes": f"{NO_LIMIT_V1}\n",
        f"{V1}/job/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{V1}/job/memory.usage_in_bytes": f"{GIB}\n",
        f"{V1}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        f"{V1}/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    }
    cgroup = "4:memory:/job\n1:cpu:/job\n0::/\n"
    root = machine(cgroup, [mount_v1("memory"), mount_v1("cpu"), mount_v2()], files).write(tmp_path)
    memory = read_memory(root)
    assert (memory.limit_bytes, memory.available_bytes, memory.oom_kills) == (2 * GIB, GIB + GIB // 2, 3)
    assert read_cpu_quota(root) == 3.0


def test_v1_container_has_its_own_group_mounted_at_the_top(tmp_path: Path) -> None:
    files = {f"{V1}/memory.limit_in_bytes": f"{GIB}\n", f"{V1}/memory.usage_in_bytes": "0\n"}
    root = machine("4:memory:/docker/abc\n", [mount_v1("memory", "/docker/abc")], files).write(tmp_path)
    assert read_memory(root).limit_bytes == GIB


@pytest.mark.parametrize(("cgroup", "mounts"), [("", []), ("0::/\n", []), ("garbage\n", ["garbage"]), ("0::/gone\n", [mount_v2()])])
def test_without_control_groups_nothing_is_limited(cgroup: str, mounts: list[str], tmp_path: Path) -> None:
    root = machine(cgroup, mounts, {}).write(tmp_path)
    memory = read_memory(root)
    assert (memory.limit_bytes, memory.available_bytes, memory.oom_kills) == (None, None, None)
    assert read_cpu_quota(root) is None


def test_each_kill_for_want_of_memory_accounts_for_one_end(tmp_path: Path) -> None:
    root = machine("0::/a\n", [mount_v2()], {f"{V2}/a/memory.events": "oom_kill 2\n"}).write(tmp_path)
    watch = OomWatch(root)
    assert not watch.took_one()
    (root / V2 / "a/memory.events").write_text("oom_kill 4\n")
    assert [watch.took_one() for _ in range(3)] == [True, True, False]


def test_outside_any_group_the_kills_of_the_machine_count(tmp_path: Path) -> None:
    root = machine("0::/\n", [], {"proc/vmstat": "pgfault 9\noom_kill 1\n"}).write(tmp_path)
    watch = OomWatch(root)
    (root / "proc/vmstat").write_text("pgfault 9\noom_kill 2\n")
    assert [watch.took_one(), watch.took_one()] == [True, False]
