"""What a running service consists of, read from /proc: processes, threads, CPUs, and how much of their memory is the shared weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

WORKER_SCRIPT = "worker_main.py"


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process. Memory in bytes; `weights` is what it maps of the model file or of a model's memfd and has touched."""

    pid: int
    role: str  # "front end" or "worker"
    lanes: tuple[int, ...]  # worker lanes; the front end's own lane has no number
    cpus: tuple[int, ...]  # where its lanes may run
    threads: int
    pss: int  # its share of all memory: what is mapped by n processes counts 1/n
    weights: int


def service_processes(pid: int, model: Path) -> list[ProcessFacts]:
    """The front end `pid` and its workers, workers in order of their first lane. Processes that end meanwhile are left out."""
    front = psutil.Process(pid)
    workers = [child for child in front.children() if _is_worker(child)]
    facts = [_facts(front, "front end", model), *(_facts(worker, "worker", model) for worker in workers)]
    return sorted((fact for fact in facts if fact is not None), key=lambda fact: (fact.role == "worker", fact.lanes))


def worker_pids(pid: int) -> list[int]:
    """Process ids of the workers of front end `pid`."""
    return [child.pid for child in psutil.Process(pid).children() if _is_worker(child)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return any(part.endswith(WORKER_SCRIPT) for part in process.cmdline())
    except psutil.Error:
        return False


def _facts(process: psutil.Process, role: str, model: Path) -> ProcessFacts | None:
    try:
        pss, weights = _memory(process.pid, model)
        return ProcessFacts(process.pid, role, _lanes(process.cmdline()), _lane_cpus(process), process.num_threads(), pss, weights)
    except (psutil.Error, OSError):
        return None


def _lanes(command: list[str]) -> tuple[int, ...]:
    """The lanes a worker's command line names; none for other processes."""
    if "--lanes" not in command:
        return ()
    text = command[command.index("--lanes") + 1]
    return tuple(int(lane) for lane in text.split(",") if lane)


def _lane_cpus(process: psutil.Process) -> tuple[int, ...]:
    """CPUs of the threads pinned to fewer than the process may use; if none is, those of the process."""
    everywhere = set(process.cpu_affinity())
    pinned: set[int] = set()
    for thread in process.threads():
        try:
            cpus = os.sched_getaffinity(thread.id)
        except ProcessLookupError:
            continue  # it has just ended
        if cpus < everywhere:
            pinned |= cpus
    return tuple(sorted(pinned or everywhere))


def _memory(pid: int, model: Path) -> tuple[int, int]:
    """(Pss of everything, Rss of the mappings that hold the model) in bytes."""
    pss = weights = 0
    for header, fields in mappings(pid):
        pss += fields.get("Pss", 0)
        if header.endswith(str(model)) or "memfd:colibri:" in header:
            weights += fields.get("Rss", 0)
    return pss, weights


def mappings(pid: int) -> Iterator[tuple[str, dict[str, int]]]:
    """(first line, fields in bytes) of each mapping in /proc/PID/smaps."""
    header, fields = "", {}
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) << 10
        elif "-" in name.split(" ")[0]:
            if header:
                yield header, fields
            header, fields = line, {}
    if header:
        yield header, fields
