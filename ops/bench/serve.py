"""The service over gRPC against the engine's own speed in the same run, and where the difference goes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ops.bench.bandwidth import Meter
from ops.bench.breakdown import Window, break_down, rates, window_of
from ops.bench.limits import MachineLimits
from ops.bench.measure import BenchError, Row
from ops.bench.message_costs import message_costs
from ops.bench.serve_client import ClientWish
from ops.bench.served import Served, Snapshot, serving, snapshot
from ops.bench.steps import BenchConfig, bench_decode

_PATIENCE = 900.0  # seconds a run of the clients may take

Stream = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class ServeCase:
    """So many streams of so many tokens, from so many client processes."""

    streams: int
    prompt: int
    answer: int
    clients: int = 1
    interval_ms: int | None = None  # that tokens may be held; None: the server's default


@dataclass(frozen=True, slots=True)
class Run:
    """What the clients saw, and the server's state at the first and the last moment at which all streams ran."""

    streams: list[Stream]
    first: Snapshot
    last: Snapshot
    client_seconds: float  # CPU of all clients between the two


def bench_serve(path: Path, config: BenchConfig, case: ServeCase, *, meter: Meter, limits: MachineLimits) -> list[Row]:
    """The engine by itself, before and after the service; the clients' tokens a second (limit: the engine's), every token sent at once and
    as the server has it by default; then microseconds a token by where they go, for the default."""
    before = bench_decode(path, config, streams=case.streams, prompt=case.prompt, meter=meter, limits=limits)
    with serving(path, config, options=["--kv-memory", _kv_memory(path, config, case)]) as served:
        _run(served, replace(case, answer=16), seed=1)  # warms up: connections, code, pages
        at_once = _run(served, replace(case, interval_ms=0), seed=3)
        run = _run(served, case, seed=2)
    after = bench_decode(path, config, streams=case.streams, prompt=case.prompt, meter=meter, limits=limits)
    python = (before.details["python"] + after.details["python"]) / 2
    own = replace(before, samples=before.samples + after.samples, details={"python": python})
    parts = break_down(_window(run), own, message_costs(path, tokens=2000))
    facts = {"streams": float(case.streams), "clients": float(case.clients)}
    name = f"{case.streams} streams"
    engine = replace(own, case=f"engine, {name}", limit=None, details=facts)
    rows = [
        Row(case_name, "tokens/s", rates(one.streams, window_of(one.streams), config.samples), facts | _bunching(one), own.median)
        for case_name, one in ((f"gRPC, {name}, each token at once", at_once), (f"gRPC, {name}", run))
    ]
    return [engine, *rows, *_part_rows("wall", parts.times, parts.wall), *_part_rows("CPU", parts.cpu, parts.wall)]


def _part_rows(kind: str, parts: dict[str, float], wall: float) -> list[Row]:
    return [Row(f"  {kind}: {name}", "us/token", (value,), {"of token": value / wall}) for name, value in parts.items()]


def _bunching(run: Run) -> dict[str, float]:
    tokens = [count for stream in run.streams for _, count in stream]
    return {"tokens/message": sum(tokens) / len(tokens)}


def _window(run: Run) -> Window:
    first, last = run.first, run.last
    moved = {name: last.totals.get(name, 0.0) - value for name, value in first.totals.items()}
    if moved["rows"] <= 0:
        raise BenchError("the answers were too short to be measured; give --answer more tokens")
    cpu = {"loop": last.loop - first.loop, "engine": last.engine - first.engine, "grpc": last.others - first.others}
    cpu |= {"workers": last.workers - first.workers, "clients": run.client_seconds}
    return Window(last.at - first.at, moved, cpu)


def _kv_memory(path: Path, config: BenchConfig, case: ServeCase) -> str:
    """Enough for every stream and no more: the plan's default may be a good part of the machine."""
    from engine_c import KV_BLOCK, KV_FORMATS, Model
    from workers.plan import kv_block_bytes

    with Model.open(path) as model:
        block = kv_block_bytes(model.info, KV_FORMATS[config.kv_format])
    return str(block * case.streams * (-(-(case.prompt + case.answer) // KV_BLOCK) + 2))


def _run(served: Served, case: ServeCase, *, seed: int) -> Run:
    """Starts the clients, looks at the server when all streams run and again before the first ends, and waits for all."""
    with _Clients(served, case, seed) as clients:
        clients.go()
        clients.wait("begin", everyone=True)
        first, spent = snapshot(served), clients.cpu_seconds()
        clients.wait("end", everyone=False)
        last, spent_last = snapshot(served), clients.cpu_seconds()
        streams = clients.results()
    return Run(streams, first, last, spent_last - spent)


class _Clients:
    """The client processes; a thread each reads what they say."""

    def __init__(self, served: Served, case: ServeCase, seed: int) -> None:
        self._said = threading.Condition()
        self._lines: list[list[str]] = [[] for _ in range(case.clients)]
        self._closed = [False] * case.clients
        self._processes = []
        vocab = _vocab(served.target)
        for index in range(case.clients):
            streams = case.streams // case.clients + (index < case.streams % case.clients)
            wish = ClientWish(served.target, streams, case.prompt, case.answer, vocab, seed * 1000 + index, case.interval_ms)
            command = [sys.executable, "-m", "ops.bench.serve_client", wish.as_json()]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        self._readers = [threading.Thread(target=self._read, args=(index,)) for index in range(case.clients)]

    def __enter__(self) -> _Clients:
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()

    def go(self) -> None:
        """Lets all begin, once all are connected."""
        self.wait("ready", everyone=True)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()

    def wait(self, word: str, *, everyone: bool) -> None:
        """Until all clients, or any, have said the word. BenchError if one ended without."""
        with self._said:
            said = self._said.wait_for(lambda: self._hopeless(word) or self._has_said(word, everyone), _PATIENCE)
            if not said or not self._has_said(word, everyone):
                raise BenchError(f"a client did not come to its {word!r}; its messages are above")

    def _has_said(self, word: str, everyone: bool) -> bool:
        return (all if everyone else any)(word in lines for lines in self._lines)

    def _hopeless(self, word: str) -> bool:
        return any(closed and word not in lines for closed, lines in zip(self._closed, self._lines, strict=True))

    def cpu_seconds(self) -> float:
        """Spent by all clients so far."""
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return sum(time.user + time.system for time in times)

    def results(self) -> list[Stream]:
        """All streams of all clients. BenchError if one failed."""
        for process, reader in zip(self._processes, self._readers, strict=True):
            reader.join(_PATIENCE)
            if process.wait(_PATIENCE):
                raise BenchError(f"a client ended with exit code {process.returncode}; its messages are above")
        streams = [stream for lines in self._lines for stream in json.loads(lines[-1])]
        return [[(at, count) for at, count in stream] for stream in streams]

    def _read(self, index: int) -> None:
        output = self._processes[index].stdout
        assert output is not None
        for line in output:
            with self._said:
                self._lines[index].append(line.strip())
                self._said.notify_all()
        with self._said:
            self._closed[index] = True
            self._said.notify_all()


def _vocab(target: str) -> int:
    from service.client import Client

    with Client(target, timeout=30) as client:
        return client.model().vocab_size
