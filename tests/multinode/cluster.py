"""Processes of a network that end with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from tests.multinode.net import Network, Place
from tests.multinode.processes import PORT, QUIET_SERVER, Process, wait_healthy
from tests.multinode.relay import Relays

_P = TypeVar("_P", bound=Process)


class Cluster:
    """Makes processes in the places of a network, and ends them."""

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

    def server(self, name: str, *, model: Path, workers: int = 0) -> tuple[Process, str]:
        """A server of its own, without nodes, that listens to the network; and how this process reaches it."""
        place = self.network.place(name)
        command = [
            sys.executable,
            "-m",
            "ops.cli",
            "serve",
            str(model),
            "--host",
            "0.0.0.0",
            "--port",
            str(PORT),
            "--operator-socket",
            "none",
        ]
        target = self.relay(place, f"{name}-{len(self.processes)}")
        process = self.begin(Process(place, command, self.folder / f"{name}.log", QUIET_SERVER | {"WORKERS_PER_NODE": str(workers)}))
        wait_healthy(process, target, "")
        return process, target

    def relay(self, place: Place, stem: str) -> str:
        """How this process reaches PORT of a place."""
        return self._relays.add(self.folder / f"{stem}.sock", source=self.network.place("tests"), address=place.address, port=PORT)

    def begin(self, process: _P) -> _P:
        """Starts a process, to be ended with the cluster."""
        self.processes.append(process)
        process.start()
        return process


@contextlib.contextmanager
def cluster(network: Network, folder: Path) -> Iterator[Cluster]:
    """A cluster that goes with the block."""
    made = Cluster(network, folder)
    try:
        yield made
    finally:
        made.close()
