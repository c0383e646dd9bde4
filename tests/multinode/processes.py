"""Processes in places, to be ended in every way and started again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fault.harness import PATIENCE, alive, limit, wait_for
from tests.multinode.net import Place

START_S = 30
PORT = 50061
QUIET = {"LOAD": "map", "WORKERS_PER_NODE": "0"}
"""Settings of small processes that start fast; the tests about memory have others."""
QUIET_SERVER = {"KV_MEMORY": "16M"}
"""Of servers beside."""


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
        # What a command line that ran in this process has set would keep gRPC from logging refused handshakes.
        ours = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        self.popen = self.place.popen(self.command, log=self.log, environ=ours | settings)

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
        return self.wait()

    def wait(self) -> int:
        """The exit code, when it has ended."""
        assert self.popen is not None
        return self.popen.wait(START_S * PATIENCE)

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None


def wait_healthy(process: Process, target: str, service: str) -> None:
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
