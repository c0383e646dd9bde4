"""`colibri node` processes as actors of a real Ray cluster, and a front end that follows the file with their addresses."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.commands.ray import write_addresses
from ops.models import resolve
from ops.ray.agent import AgentSpec, node_command
from service.client import Client, generate_request
from service.nodes.lifecycle import State
from tests.integration.serving import Serving, serving
from tests.ray.test_launcher import PATIENCE, free_ports, until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
PROGRAM = (sys.executable, "-m", "ops.cli")
LIGHT = ("--insecure", "--load", "map", "--workers-per-node", "0")


def answer(front: Serving) -> list[int]:
    with Client(front.target, timeout=PATIENCE) as client:
        request = generate_request(text="And it came to pass", max_tokens=12, temperature=0.0, ignore_eos=True)
        return list(client.complete(request).token_ids)


def ready(front: Serving) -> set[str]:
    nodes = front.server.default.nodes
    assert nodes is not None
    return {member.name for member in nodes.members if member.life.state is State.READY}


def test_experts_are_computed_by_actors_that_come_back_elsewhere(cluster: Any, tmp_path: Path) -> None:
    from ops.ray.launcher import Launcher

    model = resolve("tiny", cache=tmp_path).path
    with serving(model) as alone:
        expected = answer(alone)
    names = [f"ray-{n}" for n in (1, 2, 3)]
    launcher = Launcher(
        [
            AgentSpec(name, port, node_command(PROGRAM, str(model), share=(n, 3), name=name, host="0.0.0.0", port=port, extra=LIGHT))
            for n, (name, port) in enumerate(zip(names, free_ports(3), strict=True), 1)
        ],
        cpus=0.5,
    )
    file = tmp_path / "nodes"
    launcher.start()
    write_addresses(launcher.addresses(), file)
    try:
        with serving(model, nodes=f"file:{file}", nodes_insecure=True, nodes_fallback="off", nodes_resolve_s=1.0) as front:
            until(lambda: ready(front) == set(names), "all compute")
            assert answer(front) == expected
            states = {state.name: state for state in launcher.look()}
            assert all(state.pid for state in states.values())

            os.kill(psutil.Process(states["ray-2"].pid).ppid(), signal.SIGKILL)  # an actor's own process
            until(lambda: "ray-2" not in ready(front), "it is missed")
            until(lambda: ready(front) == set(names), "Ray has started it again, and it its node")
            assert answer(front) == expected

            worker = next(iter(cluster.worker_nodes))  # a whole Ray node
            cluster.remove_node(worker, allow_graceful=False)
            lost = until(lambda: [state.name for state in launcher.look() if not state.address], "Ray notices")
            write_addresses(launcher.addresses(), file)
            until(lambda: ready(front) == set(names) - set(lost), "the front end follows the file")
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
            until(lambda: all(state.pid for state in launcher.look()), "it has a Ray node again")
            write_addresses(launcher.addresses(), file)
            until(lambda: ready(front) == set(names), "it computes again")
            assert answer(front) == expected
            nodes = front.server.default.nodes
            assert nodes is not None
            assert nodes.remote.totals.fallback_pairs == 0
    finally:
        launcher.stop()
