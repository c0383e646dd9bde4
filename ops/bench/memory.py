"""Memory of a running service: what the front end and its workers share and what each has for itself, against weights and KV cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ops.bench.measure import BenchError, Row
from ops.bench.served import serving
from ops.bench.steps import BenchConfig
from ops.processes import mappings, worker_pids

_MIB = 1 << 20
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Share:
    """Proportional set sizes of one process in bytes: what n processes map counts 1/n."""

    total: int
    weights: int
    arena: int  # KV cache, activations, the team's state
    rest: int  # the process's own: interpreter, libraries, heap


def share_of(maps: Iterable[tuple[str, Mapping[str, int]]], model: Path) -> Share:
    """Adds up the mappings of /proc/PID/smaps."""
    total = weights = arena = 0
    for header, fields in maps:
        pss = fields.get("Pss", 0)
        total += pss
        if header.endswith(str(model)) or "memfd:colibri:" in header:
            weights += pss
        elif "memfd:colibri" in header:
            arena += pss
    return Share(total, weights, arena, total - weights - arena)


def bench_memory(path: Path, config: BenchConfig, *, workers: list[int], kv_memory: str, load: str) -> list[Row]:
    """One row a process and one for all, with each number of worker processes, after every page of the weights was used."""
    rows = []
    for count in workers:
        rows += _one(path, replace(config, workers_per_node=count), kv_memory=kv_memory, load=load)
    return rows


def _one(path: Path, config: BenchConfig, *, kv_memory: str, load: str) -> list[Row]:
    from service.config import parse_bytes

    options = ["--kv-memory", kv_memory, "--load", load]
    with serving(path, config, options=options) as served:
        _use_everything(served.target)
        pids = _processes(served.pid, config.workers_per_node or 0)
        found = [share_of(mappings(pid), path.resolve() if load == "map" else path) for pid in pids]
    name = f"{config.workers_per_node} workers"
    whole = Share(*(sum(getattr(share, field) for share in found) for field in Share.__slots__))
    needed = (path.stat().st_size + parse_bytes(kv_memory)) / _MIB
    rows = [_row(f"{name}: front end", found[0]), *(_row(f"{name}: worker {index}", share) for index, share in enumerate(found[1:], 1))]
    return [*rows, replace(_row(f"{name}: all", whole), limit=needed)]


def _row(case: str, share: Share) -> Row:
    parts = {"weights": share.weights / _MIB, "KV and arena": share.arena / _MIB, "own": share.rest / _MIB}
    return Row(case, "MiB", (share.total / _MIB,), parts)


def _processes(pid: int, workers: int) -> list[int]:
    found = worker_pids(pid)
    if len(found) < workers:
        raise BenchError(f"{workers} workers were asked for, {len(found)} run")
    return [pid, *sorted(found)]


def _use_everything(target: str) -> None:
    """Prompts of as many different tokens as the model takes, so that every expert and most of the vocabulary is read."""
    from service.client import Client, generate_request

    with Client(target, timeout=120) as client:
        client.wait_ready(60)
        model = client.model()
        length = min(model.max_context - 8, 2048)
        step = max(1, model.vocab_size // length)
        end = time.monotonic() + _PATIENCE
        for start in range(min(step, 16)):
            tokens = [(start + step * index) % model.vocab_size for index in range(length)]
            client.complete(generate_request(tokens=tokens, max_tokens=4, temperature=0, ignore_eos=True))
            if time.monotonic() > end:
                return
