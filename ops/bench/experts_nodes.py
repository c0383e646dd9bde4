"""Real `colibri node` processes on loopback, each with a share of the experts, and a front end's side of them in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ops.bench.measure import BenchError
from ops.bench.served import environment, free_port, listens, stop
from ops.bench.steps import BenchConfig
from service.artifact import read_artifact
from service.config import ServeConfig
from service.nodes.lifecycle import State
from service.nodes.nodes import Nodes, open_nodes
from workers.team import Team

_START_SECONDS = 120.0
_POLL = 0.01


@dataclass(frozen=True, slots=True)
class Cores:
    """CPUs of the front end, and of each node. `shared`: there are too few for each node to have its own."""

    front: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    shared: bool


def share_cores(cpus: Sequence[int], nodes: int, *, lanes: int) -> Cores:
    """`lanes` CPUs for each, as far as they go: the front end's first, which no node is given unless there is only one. Pure."""
    front, left = tuple(cpus[:lanes]), tuple(cpus[lanes:]) or tuple(cpus)
    if len(left) >= nodes * lanes:
        return Cores(front, tuple(left[index * lanes : (index + 1) * lanes] for index in range(nodes)), shared=len(cpus) < 2)
    return Cores(front, (left,) * nodes, shared=nodes > 1 or len(cpus) < 2)


@contextmanager
def pinned(cpus: Sequence[int]) -> Iterator[None]:
    """This thread, and those it starts, on these CPUs; as it was afterwards."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def node_processes(path: Path, config: BenchConfig, cores: Cores) -> Iterator[list[str]]:
    """Nodes with an equal share each, once they listen; their addresses. BenchError with the log of one that ends."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="colibri-bench-")))
        logs, processes, ports = [], [], []
        for index, cpus in enumerate(cores.nodes, 1):
            log, port = folder / f"node-{index}.log", free_port()
            with log.open("wb") as output, pinned(cpus):
                process = subprocess.Popen(
                    _command(path, config, index, len(cores.nodes), port),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment(),
                )
            undo.callback(stop, process)
            logs.append(log)
            processes.append(process)
            ports.append(port)
        for process, log, port in zip(processes, logs, ports, strict=True):
            _wait_listening(process, log, port)
        yield [f"127.0.0.1:{port}" for port in ports]


def _wait_listening(process: subprocess.Popen[bytes], log: Path, port: int) -> None:
    end = time.monotonic() + _START_SECONDS
    while not listens(port):
        if process.poll() is not None:
            raise BenchError(f"a node ended with exit code {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
        if time.monotonic() > end:
            raise BenchError(f"a node was not there after {_START_SECONDS:.0f} s: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(_POLL)


def _command(path: Path, config: BenchConfig, index: int, count: int, port: int) -> list[str]:
    command = [sys.executable, "-m", "ops.cli", "node", str(path), "--port", str(port)]
    command += ["--name", f"n{index}", "--share", f"{index}/{count}", "--load", config.load]
    workers, threads = config.workers_per_node, config.threads_per_worker
    command += ["--workers-per-node", str(workers)] if workers is not None else []
    return command + (["--threads-per-worker", str(threads)] if threads is not None else [])


@contextmanager
def connected(path: Path, places: Sequence[str], team: Team) -> Iterator[Nodes]:
    """A front end's nodes, once all compute for us. What none of them has is not computed here instead: it is to be seen."""
    config = ServeConfig(model=path, nodes=",".join(places), nodes_fallback="off", nodes_timeout_ms=10_000)
    nodes = open_nodes(config, read_artifact(path), team.model.info, kv_blocks=team.session.options.kv_blocks)
    try:
        end = time.monotonic() + _START_SECONDS
        while [member.life.state for member in nodes.members] != [State.READY] * len(places) or nodes.remote.missing():
            if time.monotonic() > end:
                states = "; ".join(f"{member.name}: {member.life.state.value} {member.life.reason}" for member in nodes.members)
                raise BenchError(f"the nodes were not ready after {_START_SECONDS:.0f} s: {states}")
            time.sleep(_POLL)
        yield nodes
    finally:
        nodes.close()
