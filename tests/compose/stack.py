"""The project of docker-compose.yml, from a clean clone, and what may be done to its containers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from ops.commands.health import ask as ask_health
from tests.compose.engine import BASE_IMAGE, IMAGE, ROOT, Engine, run, until

if TYPE_CHECKING:
    from colibri.v1 import node_pb2

PROJECT = "colibritest"
NODES_NETWORK = f"{PROJECT}_nodes"
READY_S = 60


def clone(folder: Path) -> Path:
    """What git has of this tree, as it is now, and nothing that was built."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], environ=dict(os.environ), seconds=20)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


@dataclass(frozen=True, slots=True)
class Stack:
    """The containers of a clone."""

    engine: Engine
    folder: Path
    port: int
    files: tuple[str, ...] = ()  # none: those that Compose takes by itself

    @property
    def target(self) -> str:
        """Where clients outside ask."""
        return f"localhost:{self.port}"

    @property
    def settings(self) -> dict[str, str]:
        """What a user would put into .env."""
        return {"BASE": BASE_IMAGE, "IMAGE": IMAGE, "PORT": str(self.port)}

    def compose(self, *arguments: str, seconds: float = 180) -> str:
        """docker-compose in the clone."""
        chosen = [part for name in self.files for part in ("-f", name)]
        command = ["docker-compose", "-p", PROJECT, *chosen, *arguments]
        return run(command, environ=self.engine.environ | self.settings, seconds=seconds, folder=self.folder)

    def up(self, *arguments: str, nodes: int = 3) -> None:
        """`docker-compose up` with so many nodes; returns when all hold their share."""
        self.compose("up", "-d", "--scale", f"node={nodes}", *arguments, seconds=300)
        until(self.serves, "the front end serves", seconds=READY_S)
        self.wait_nodes(nodes)

    def serves(self) -> bool:
        """Whether clients are answered."""
        try:
            return ask_health(self.target, timeout=1) == "SERVING"
        except grpc.RpcError:
            return False

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers."""
        return self.compose("ps", "-q", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        found = json.loads(self.engine.docker("inspect", container))[0]
        assert isinstance(found, dict)
        return found

    def kill_process(self, container: str) -> None:
        """SIGKILL to the container's first process, as a crash would end it. `docker kill` would keep it from being restarted."""
        os.kill(self.inspect(container)["State"]["Pid"], signal.SIGKILL)

    def remote_nodes(self) -> list[Mapping[str, Any]]:
        """What the front end says of its nodes; nothing while it can't be asked."""
        command = ["docker", "exec", self.containers("front")[0], "colibri", "topology", "--json"]
        said = subprocess.run(command, capture_output=True, text=True, env=self.engine.environ, timeout=30, check=False)
        return json.loads(said.stdout).get("remote_nodes", []) if said.returncode == 0 else []

    def address(self, container: str) -> str:
        """In the network of nodes; empty if it is not there."""
        networks = self.inspect(container)["NetworkSettings"]["Networks"]
        return str(networks.get(NODES_NETWORK, {}).get("IPAddress", ""))

    def describe(self, container: str) -> node_pb2.NodeDescription | None:
        """What a node says of itself; None if it does not answer."""
        from colibri.v1 import node_pb2, node_pb2_grpc

        with grpc.insecure_channel(f"{self.address(container)}:50061") as channel:
            try:
                return node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest(), timeout=2)
            except grpc.RpcError:
                return None

    def wait_nodes(self, count: int, *, seconds: float = READY_S) -> list[int]:
        """Until so many nodes hold every expert once between them; how many each holds, in no order."""
        return until(lambda: self._shares(count), f"{count} nodes hold all experts", seconds=seconds)

    def _shares(self, count: int) -> list[int]:
        found = [self.describe(container) for container in self.containers("node")]
        nodes = [node for node in found if node is not None]
        held = [(share.layer, expert) for node in nodes for share in node.shares for expert in share.experts]
        if len(nodes) != count or not nodes or len(set(held)) != nodes[0].layers * nodes[0].experts or len(held) != len(set(held)):
            return []
        return [sum(len(share.experts) for share in node.shares) for node in nodes]
