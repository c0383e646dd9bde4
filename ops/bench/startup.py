"""How long things take to begin: opening a container, starting the workers, a server to SERVING, a cold process to its first token."""

from __future__ import annotations

import time
from pathlib import Path

from engine_c import KV_FORMATS, Model, SessionOptions
from ops.bench.measure import Row
from ops.bench.served import serving
from ops.bench.steps import BenchConfig
from workers.team import Team, TeamConfig

_PROMPT = tuple(range(3, 35))
_KV_BLOCKS = 64


def bench_startup(path: Path, config: BenchConfig) -> list[Row]:
    """Milliseconds, everything in the page cache (the first sample of each is thrown away)."""
    opens = tuple(_open_ms(path) for _ in range(config.samples + 1))[1:]
    teams = tuple(_team_ms(path, config) for _ in range(config.samples + 1))[1:]
    servers = [_serve_ms(path, config) for _ in range(config.samples + 1)][1:]
    return [
        Row("open the container", "ms", opens),
        Row("open and start the workers", "ms", teams),
        Row("serve: process to SERVING", "ms", tuple(ready for ready, _ in servers)),
        Row("serve: process to the first token", "ms", tuple(first for _, first in servers), {"prompt": len(_PROMPT)}),
    ]


def _open_ms(path: Path) -> float:
    begin = time.perf_counter()
    with Model.open(path):
        return (time.perf_counter() - begin) * 1e3


def _team_ms(path: Path, config: BenchConfig) -> float:
    options = SessionOptions(max_rows=config.max_rows, kv_blocks=_KV_BLOCKS, kv_format=KV_FORMATS[config.kv_format])
    wish = TeamConfig(
        load_mode="auto",
        workers_per_node=config.workers_per_node,
        threads_per_worker=config.threads_per_worker,
        session=options,
    )
    begin = time.perf_counter()
    with Team.open(path, wish):
        return (time.perf_counter() - begin) * 1e3


def _serve_ms(path: Path, config: BenchConfig) -> tuple[float, float]:
    """(to SERVING, to the first token) since just before the process was started."""
    from service.client import Client, generate_request

    with serving(path, config) as served, Client(served.target, timeout=120) as client:
        client.wait_ready(60)
        vocab = client.model().vocab_size
        request = generate_request(tokens=[token % vocab for token in _PROMPT], max_tokens=2, temperature=0, ignore_eos=True)
        answer = client.generate(request)
        next(answer)
        first = time.monotonic() - served.started
        answer.close()  # type: ignore[attr-defined]
        return served.seconds * 1e3, first * 1e3
