"""`colibri node` processes and front ends, each in a place of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from colibri.v1 import node_pb2, node_pb2_grpc, operator_pb2 as op, operator_pb2_grpc
from tests.fault.harness import PATIENCE, alive, limit, wait_for
from tests.multinode.net import Network, Place
from tests.multinode.relay import Relays

_P = TypeVar("_P", bound="Process")
START_S = 30
PORT = 50061
QUIET = {"LOAD": "map", "WORKERS_PER_NODE": "0", "KV_MEMORY": "16M"}
"""Settings of small processes that start fast; the tests about memory have others."""


@dataclass
class Process:
    """A process that can be ended in every way and started again."""

    place: Place
    command: Sequence[str]
    log: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[bytes] | None = None
    _seen: int = 0

    def start(self) -> None:
        """As a new process, of another log."""
        assert self.popen is None or self.popen.poll() is not None, "it runs"
        self._seen = self.log.stat().st_size if self.log.exists() else 0
        settings = {f"COLIBRI_{name}": value for name, value in (QUIET | dict(self.environ)).items()}
        self.popen = self.place.popen(self.command, log=self.log, environ=os.environ | settings)

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def says(self) -> str:
        """What it has logged since its start."""
        return self.log.read_bytes()[self._seen :].decode(errors="replace")

    def wait_says(self, *words: str, seconds: float = START_S) -> None:
        """Waits until each of these has been logged, since its start."""
        try:
            wait_for(lambda: all(word in self.says() for word in words), seconds=limit(seconds), what=f"it says {words}")
        except AssertionError as error:
            raise AssertionError(f"{error}. It said:\n{self.says()[-4000:]}") from error

    def signal(self, number: signal.Signals) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def tree(self) -> list[psutil.Process]:
        """It and all its children."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def kill(self) -> None:
        """kill -9; returns when it and its workers are gone."""
        pids = [process.pid for process in self.tree()] if self.running else []
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait(5 * PATIENCE)
        wait_for(lambda: not alive(pids), seconds=limit(5), what="its workers end with it")

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        assert self.popen is not None
        return self.popen.wait(START_S * PATIENCE)

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None


@dataclass
class Node(Process):
    """A node agent. target: how this process reaches it, plaintext only."""

    target: str = ""

    def describe(self, *, timeout: float = 5) -> node_pb2.NodeDescription:
        with grpc.insecure_channel(self.target) as channel:
            return node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest(), timeout=timeout)

    def wait_ready(self) -> None:
        _wait_healthy(self, self.target, "colibri.v1.Experts")


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

    def wait_ready(self) -> None:
        _wait_healthy(self, self.target, "")


def _wait_healthy(process: Process, target: str, service: str) -> None:
    """Waits until a process serves, or fails with what it said."""

    def serves() -> bool:
        assert process.running, f"it has ended:\n{process.says()[-4000:]}"
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(target, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            wait_for(serves, seconds=limit(START_S), what="it serves")
        except AssertionError as error:
            raise AssertionError(f"{error}. It said:\n{process.says()[-4000:]}") from error


class Cluster:
    """Makes nodes and front ends of a network, and ends them."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.processes: list[Process] = []
        self._relays = Relays()

    def close(self) -> None:
        """Kills all that still run."""
        for process in self.processes:
            if process.running:
                process.kill()
            self.network.heal(process.place)
        self._relays.close()

    def node(self, name: str, *options: str, model: Path, wait: bool = True, main: str = "", **environ: str) -> Node:
        """Starts a node in the place of its name. main: a program to run instead of `-m ops.cli`."""
        place = self.network.place(name)
        command = [sys.executable, *(["-c", main] if main else ["-m", "ops.cli"]), "node", str(model)]
        command += ["--name", name, "--host", "0.0.0.0", "--port", str(PORT), *options]
        relay = self.folder / f"{name}-{len(self.processes)}.sock"
        target = self._relays.add(relay, source=self.network.place("tests"), address=place.address, port=PORT)
        node = Node(place, command, self.folder / f"{relay.stem}.log", environ, target=target)
        return self._begin(node, wait=wait)

    def front(self, nodes: Sequence[Place] | str, *, model: Path, wait: bool = True, name: str = "front", **environ: str) -> FrontEnd:
        """Starts a front end over these nodes, of settings given as COLIBRI_<NAME>."""
        stem = f"{name}-{len(self.processes)}"
        socket, operators = self.folder / f"{stem}.sock", self.folder / f"{stem}-op.sock"
        spec = nodes if isinstance(nodes, str) else ",".join(f"{place.address}:{PORT}" for place in nodes)
        command = [sys.executable, "-m", "ops.cli", "serve", str(model), "--unix-socket", str(socket), "--operator-socket", str(operators)]
        settings = {"NODES": spec, "NODES_INSECURE": "on"} | environ
        front = FrontEnd(
            self.network.place(name), command, self.folder / f"{stem}.log", settings, target=f"unix:{socket}", operators=f"unix:{operators}"
        )
        return self._begin(front, wait=wait)

    def _begin(self, process: _P, *, wait: bool) -> _P:
        self.processes.append(process)
        process.start()
        if wait and isinstance(process, Node | FrontEnd):
            process.wait_ready()
        return process


@contextlib.contextmanager
def cluster(network: Network, folder: Path) -> Iterator[Cluster]:
    """A cluster that goes with the block."""
    made = Cluster(network, folder)
    try:
        yield made
    finally:
        made.close()
