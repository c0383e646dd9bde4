"""A real `colibri serve` to measure: started as a process of its own, asked over gRPC, its totals and CPU times read, stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ops.bench.measure import BenchError
from ops.bench.steps import BenchConfig
from service.engine import THREAD_NAME

_START_SECONDS, _STOP_SECONDS = 120.0, 60.0
_POLL = 0.002
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is SERVING."""

    process: subprocess.Popen[bytes]
    target: str
    metrics: str  # URL
    started: float  # time.monotonic() just before the process was started
    seconds: float  # from there to SERVING

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's totals and the CPU seconds spent so far, by who spent them."""

    at: float  # time.monotonic()
    totals: dict[str, float]
    engine: float
    loop: float
    others: float  # gRPC's threads and what else the front end has
    workers: float


@contextmanager
def serving(path: Path, config: BenchConfig, *, options: Sequence[str] = ()) -> Iterator[Served]:
    """`colibri serve` on free ports; BenchError with its log if it does not come up."""
    with tempfile.TemporaryDirectory(prefix="colibri-bench-") as folder:
        log, port = Path(folder) / "serve.log", free_port()
        target, metrics = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{port}/metrics"
        command = [sys.executable, "-m", "ops.cli", "serve", str(path), "--port", target.rpartition(":")[2], "--metrics-port", str(port)]
        command += ["--kv-format", config.kv_format, *_team(config), *options]
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment())
        try:
            wait_serving(process, target, log)
            yield Served(process, target, metrics, started, time.monotonic() - started)
        finally:
            stop(process)


def environment() -> dict[str, str]:
    """As an installed server has it: its modules are compiled once, not at every start."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _team(config: BenchConfig) -> list[str]:
    options = []
    if config.workers_per_node is not None:
        options += ["--workers-per-node", str(config.workers_per_node)]
    if config.threads_per_worker is not None:
        options += ["--threads-per-worker", str(config.threads_per_worker)]
    return options


def free_port() -> int:
    """A TCP port nobody listens on just now."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_serving(process: subprocess.Popen[bytes], target: str, log: Path) -> None:
    """Returns once health says SERVING. BenchError if the process ends or time runs out."""
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

    end = time.monotonic() + _START_SECONDS
    port = int(target.rpartition(":")[2])
    while not listens(port):  # a channel would back off for a second after a refusal
        _check_alive(process, log, end)
        time.sleep(_POLL)
    with grpc.insecure_channel(target) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        request = HealthCheckRequest(service="colibri.v1.Inference")
        while check(request, wait_for_ready=True, timeout=_START_SECONDS).status != HealthCheckResponse.SERVING:
            _check_alive(process, log, end)
            time.sleep(_POLL)


def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _check_alive(process: subprocess.Popen[bytes], log: Path, end: float) -> None:
    if process.poll() is not None:
        raise BenchError(f"the server ended with exit code {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
    if time.monotonic() > end:
        raise BenchError(f"the server was not ready after {_START_SECONDS:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL to what does not drain in time."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def snapshot(served: Served) -> Snapshot:
    """Now."""
    from ops.processes import worker_pids

    totals = read_totals(urllib.request.urlopen(served.metrics, timeout=10).read().decode())
    threads = thread_seconds(served.pid)
    engine = sum(seconds for _tid, name, seconds in threads if name == THREAD_NAME)
    loop = sum(seconds for tid, _name, seconds in threads if tid == served.pid)
    others = sum(seconds for tid, name, seconds in threads if tid != served.pid and name != THREAD_NAME)
    workers = sum(seconds for pid in worker_pids(served.pid) for _tid, _name, seconds in thread_seconds(pid))
    return Snapshot(time.monotonic(), totals, engine, loop, others, workers)


def read_totals(text: str) -> dict[str, float]:
    """colibri_* counters and gauges of a Prometheus page that carry no label but the model's, by bare name."""
    totals = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        labels, _, value = rest.partition("} ")
        if name.startswith("colibri_") and labels.count("=") == 1:
            totals[name.removeprefix("colibri_").removesuffix("_total")] = float(value)
    return totals


def thread_seconds(pid: int) -> list[tuple[int, str, float]]:
    """(thread id, name, CPU seconds to the clock tick, 10 ms as a rule) of each thread of a process."""
    threads = []
    for folder in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, _, fields = (folder / "stat").read_text(encoding="utf-8").partition("(")[2].rpartition(")")
            user, system = fields.split()[11:13]
            threads.append((int(folder.name), name, (int(user) + int(system)) / _TICKS))
        except (OSError, IndexError):
            continue  # it has just ended
    return threads
