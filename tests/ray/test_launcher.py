"""Agents on a real Ray cluster: one a Ray node, back after whatever ends them, gone without a trace when told to."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.ray.agent import AgentSpec

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
PROGRAM = Path(__file__).with_name("node_program.py")
PATIENCE = 90.0


def until(condition: Callable[[], object], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"not in {PATIENCE:.0f} s: {what}"
        time.sleep(0.05)
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def specs(folder: Path, count: int) -> list[AgentSpec]:
    return [
        AgentSpec(f"ray-{n}", port, (sys.executable, str(PROGRAM), str(port), str(folder))) for n, port in enumerate(free_ports(count), 1)
    ]


def began(folder: Path, spec: AgentSpec) -> set[int]:
    return {int(path.name.rsplit("-", 1)[1]) for path in folder.glob(f"began-{spec.port}-*")}


def test_agents_live_one_on_each_ray_node_come_back_and_end(cluster: Any, tmp_path: Path) -> None:
    import ray

    from ops.ray.launcher import Launcher

    wanted = specs(tmp_path, 3)
    launcher = Launcher(wanted, cpus=0.5)
    launcher.start()
    until(lambda: all(began(tmp_path, spec) for spec in wanted), "all have begun")
    states = launcher.look()
    assert {state.ray_node for state in states} == {node["NodeID"] for node in ray.nodes()}
    assert [state.restarts for state in states] == [0, 0, 0]
    assert launcher.addresses().split(",") == [state.address for state in states]
    assert [int(address.rsplit(":", 1)[1]) for address in launcher.addresses().split(",")] == [spec.port for spec in wanted]

    first = states[0].pid
    os.kill(first, signal.SIGKILL)
    until(lambda: launcher.look()[0].pid not in (0, first), "a killed process is started again")
    assert launcher.look()[0].restarts == 1
    assert "SIGKILL" in launcher.look()[0].error

    second = states[1].pid
    os.kill(psutil.Process(second).ppid(), signal.SIGKILL)  # the actor's own process
    until(lambda: not psutil.pid_exists(second), "the kernel ends what a dead actor had started")
    until(lambda: launcher.look()[1].pid not in (0, second), "Ray starts the actor again, and it its process")
    assert launcher.look()[2].pid == states[2].pid, "the others notice nothing"

    running = {state.pid for state in launcher.look()}
    launcher.stop()
    assert not any(psutil.pid_exists(pid) for pid in running)
    assert all(any(tmp_path.glob(f"ended-{spec.port}-*")) for spec in wanted), "they were let finish"


def test_an_agent_whose_ray_node_is_lost_moves_to_one_without(cluster: Any, tmp_path: Path) -> None:
    from ops.ray.launcher import Launcher, RayLaunchError, ray_nodes

    with pytest.raises(RayLaunchError, match="4 nodes are wanted, the cluster has 3"):
        Launcher(specs(tmp_path, 4)).start()
    launcher = Launcher(specs(tmp_path, 3), cpus=0.5)
    launcher.start()
    before = {state.name: state for state in until(lambda: _all_run(launcher), "all run")}
    worker = next(iter(cluster.worker_nodes))
    lost = worker.unique_id if hasattr(worker, "unique_id") else worker.node_id
    cluster.remove_node(worker, allow_graceful=False)
    until(lambda: len(ray_nodes()) == 2, "Ray notices")
    homeless = [state for state in launcher.look() if not state.address]
    assert len(homeless) == 1, lost
    assert homeless[0].error == "no Ray node is free for it"
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    after = {state.name: state for state in until(lambda: _all_run(launcher), "it has a Ray node again")}
    moved = [name for name in before if after[name].ray_node != before[name].ray_node]
    assert moved == [homeless[0].name]
    launcher.stop()


def _all_run(launcher: Any) -> Any:
    states = launcher.look()
    return states if all(state.pid for state in states) else None
