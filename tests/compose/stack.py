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
from service.config import ServeConfig
from service.nodes.shares import suits
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


def free_ports(count: int = 1) -> tuple[int, ...]:
    """So many in a row that nobody listens on, below those that clients' own connections are given."""
    for first in range(20000 + os.getpid() % 5000, 32000, count):
        ports = tuple(range(first, first + count))
        if all(_is_free(port) for port in ports):
            return ports
    raise AssertionError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


def _serves(target: str) -> bool:
    try:
        return ask_health(target, timeout=1) == "SERVING"
    except grpc.RpcError:
        return False


@dataclass(frozen=True, slots=True)
class Stack:
    """The containers of a clone."""

    engine: Engine
    folder: Path
    ports: tuple[int, ...]  # of the host, for front ends: each takes a free one of them
    files: tuple[str, ...] = ()  # none: those that Compose takes by itself

    @property
    def target(self) -> str:
        """Where clients outside ask."""
        return f"localhost:{self.ports[0]}"

    @property
    def targets(self) -> str:
        """All front ends there may be, as gRPC writes it."""
        return f"ipv4:{','.join(f'127.0.0.1:{port}' for port in self.ports)}"

    @property
    def settings(self) -> dict[str, str]:
        """What a user would put into .env."""
        ports = str(self.ports[0]) if len(self.ports) == 1 else f"{self.ports[0]}-{self.ports[-1]}"
        return {"BASE": BASE_IMAGE, "IMAGE": IMAGE, "PORT": ports}

    def compose(self, *arguments: str, seconds: float = 180) -> str:
        """docker-compose in the clone."""
        chosen = [part for name in self.files for part in ("-f", name)]
        command = ["docker-compose", "-p", PROJECT, *chosen, *arguments]
        return run(command, environ=self.engine.environ | self.settings, seconds=seconds, folder=self.folder)

    def up(self, *arguments: str, nodes: int = 3, fronts: int = 1) -> None:
        """`docker-compose up` with so many of each; returns when all nodes hold their share."""
        self.compose("up", "-d", "--scale", f"node={nodes}", "--scale", f"front={fronts}", *arguments, seconds=300)
        until(lambda: self.serving() == fronts, "the front ends serve", seconds=READY_S)
        self.wait_nodes(nodes)

    def serving(self) -> int:
        """How many front ends answer clients."""
        return sum(_serves(f"localhost:{port}") for port in self.ports)

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers, the oldest first. As `docker-compose ps -q`, which takes a second and more."""
        labels = {"project": PROJECT, "service": service, "oneoff": "False"}
        chosen = [part for label, value in labels.items() for part in ("--filter", f"label=com.docker.compose.{label}={value}")]
        return self.engine.docker("ps", "--all", "--quiet", "--no-trunc", *chosen).split()[::-1]

    def script(self, name: str, *arguments: str, **settings: str) -> str:
        """One of ops/deploy, as a user runs it in the clone."""
        environ = self.engine.environ | self.settings | settings | {"COMPOSE_PROJECT_NAME": PROJECT}
        return run([str(self.folder / "ops" / "deploy" / name), *arguments], environ=environ, seconds=300, folder=self.folder)

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
        """Until so many nodes hold all experts between them, each about as many; how many each holds, in no order."""
        return until(lambda: self._shares(count), f"{count} nodes hold all experts", seconds=seconds)

    def _shares(self, count: int) -> list[int]:
        found = [self.describe(container) for container in self.containers("node")]
        nodes = [node for node in found if node is not None]
        if len(nodes) != count or not nodes:
            return []
        held = {node.name: frozenset((share.layer, expert) for share in node.shares for expert in share.experts) for node in nodes}
        fits = suits(held, [nodes[0].experts] * nodes[0].layers, replicas=1, slack=ServeConfig().nodes_slack)
        return [len(pairs) for pairs in held.values()] if fits else []
