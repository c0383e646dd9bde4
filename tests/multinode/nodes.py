"""`colibri node` processes and front ends, each in a place of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from colibri.v1 import node_pb2, node_pb2_grpc, operator_pb2 as op, operator_pb2_grpc
from tests.fault.harness import limit, wait_for
from tests.multinode.cluster import Cluster
from tests.multinode.net import Network, Place
from tests.multinode.processes import PORT, QUIET_SERVER, START_S, Process, wait_healthy


@dataclass
class Node(Process):
    """A node agent. target: how this process reaches it, plaintext only."""

    target: str = ""

    def describe(self, *, timeout: float = 5) -> node_pb2.NodeDescription:
        with grpc.insecure_channel(self.target) as channel:
            return node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest(), timeout=timeout)

    def wait_ready(self) -> None:
        wait_healthy(self, self.target, "colibri.v1.Experts")

    def sockets(self) -> int:
        """Connections that have come to its port and are open."""
        lines = [line for table in ("tcp", "tcp6") for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]]
        return sum(words[1].endswith(f":{PORT:04X}") and words[3] == "01" for words in map(str.split, lines))


@dataclass
class FrontEnd(Process):
    """A front end; clients and operators reach it by sockets in the file system, whatever becomes of the network."""

    target: str = ""
    operators: str = ""

    def nodes(self) -> dict[str, op.RemoteNode]:
        """What the front end says of its nodes, by name."""
        with grpc.insecure_channel(self.operators) as channel:
            topology = operator_pb2_grpc.OperatorStub(channel).Topology(op.TopologyRequest(), timeout=START_S)
        return {node.name or node.address: node for node in topology.remote_nodes}

    def ready(self) -> set[str]:
        """Names of the nodes that compute for it."""
        return {name for name, node in self.nodes().items() if node.state == op.REMOTE_NODE_STATE_READY}

    def wait_nodes(self, *names: str, seconds: float = 10) -> float:
        """Waits until just these compute for it; returns how long that took."""
        try:
            return wait_for(lambda: self.ready() == set(names), seconds=limit(seconds), what=f"nodes {names} compute")
        except AssertionError as error:
            raise AssertionError(f"{error}. It knows {self.nodes()} and said:\n{self.says()[-4000:]}") from error

    def wait_ready(self) -> None:
        wait_healthy(self, self.target, "")


class Nodes(Cluster):
    """Makes nodes and front ends too."""

    @property
    def nodes(self) -> list[Node]:
        """All that were made."""
        return [process for process in self.processes if isinstance(process, Node)]

    def node(self, name: str, *options: str, model: Path, wait: bool = True, main: str = "", **environ: str) -> Node:
        """Starts a node in the place of its name. main: a program to run instead of `-m ops.cli`."""
        place = self.network.place(name)
        command = [sys.executable, *(["-c", main] if main else ["-m", "ops.cli"]), "node", str(model)]
        command += ["--name", name, "--host", "0.0.0.0", "--port", str(PORT), *options]
        if "--tls-cert" not in options:
            command.append("--insecure")
        stem = f"{name}-{len(self.processes)}"
        node = Node(place, command, self.folder / f"{stem}.log", environ, target=self.relay(place, stem))
        self.begin(node)
        if wait:
            node.wait_ready()
        return node

    def front(self, nodes: Sequence[Place] | str, *, model: Path, wait: bool = True, name: str = "front", **environ: str) -> FrontEnd:
        """Starts a front end over these nodes, of settings given as COLIBRI_<NAME>."""
        stem = f"{name}-{len(self.processes)}"
        socket, operators = self.folder / f"{stem}.sock", self.folder / f"{stem}-op.sock"
        spec = nodes if isinstance(nodes, str) else ",".join(f"{place.address}:{PORT}" for place in nodes)
        command = [sys.executable, "-m", "ops.cli", "serve", str(model), "--unix-socket", str(socket), "--operator-socket", str(operators)]
        settings = QUIET_SERVER | {"NODES": spec, "NODES_INSECURE": "on"} | environ
        front = FrontEnd(
            self.network.place(name), command, self.folder / f"{stem}.log", settings, target=f"unix:{socket}", operators=f"unix:{operators}"
        )
        self.begin(front)
        if wait:
            front.wait_ready()
        return front


@contextlib.contextmanager
def nodes_of(network: Network, folder: Path) -> Iterator[Nodes]:
    """A cluster of nodes that goes with the block."""
    made = Nodes(network, folder)
    try:
        yield made
    finally:
        made.close()
