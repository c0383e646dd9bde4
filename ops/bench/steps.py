"""Whole steps: the service's own scheduler and a real team of worker processes, without gRPC. Every stream has random tokens of its own,
so streams choose experts independently, as real ones do."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from engine_c import GREEDY, KV_BLOCK, KV_FORMATS, ModelInfo, Remote, Session, SessionOptions, StepStats
from ops.bench.bandwidth import Meter
from ops.bench.limits import MachineLimits, limit_tokens
from ops.bench.measure import BenchError, Row, percentile
from service.blocks import BlockPool
from service.collector import calm_collector
from service.plan import Limits
from service.request import Request, State
from service.scheduler import Scheduler
from workers.segments import LoadMode
from workers.team import Team, TeamConfig

_WARM_STEPS = 4  # not measured: pages are touched, lanes wake
BURST_STEPS = 16  # decode steps of one sample


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Who computes, and how large sessions are. workers None: one per node, as `colibri serve` plans it."""

    workers_per_node: int | None = None
    threads_per_worker: int | None = None
    kv_format: str = "bf16"
    load: LoadMode = "auto"
    max_rows: int = 512
    samples: int = 5
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Timed:
    """One step as the caller saw it."""

    seconds: float  # schedule, step and complete together
    rows: int
    stats: StepStats
    distinct: float  # different tokens sampled over tokens sampled; 1 if none was


class Helper(Remote, Protocol):
    """Who computes experts of a step elsewhere."""

    def prepare(self, session: Session) -> object:
        """Before each step: tells the session which."""
        ...


class Bench:
    """A team, a scheduler over it, and requests made of random tokens."""

    def __init__(self, team: Team, options: SessionOptions, seed: int) -> None:
        self.team = team
        self.elsewhere: Helper | None = None  # who computes experts of the steps from now on
        self._random = random.Random(seed)
        self._made = 0
        limits = Limits(options.max_rows, options.max_seqs, options.max_logit_rows, max_queue=options.max_seqs, max_queue_tokens=1 << 30)
        self.scheduler = Scheduler(limits, BlockPool(options.kv_blocks))

    @property
    def info(self) -> ModelInfo:
        return self.team.model.info

    def add(self, *, prompt: int, answer: int) -> Request:
        """Queues a greedy request of `prompt` random tokens that ends after `answer` tokens and at nothing else."""
        self._made += 1
        tokens = tuple(self._random.randrange(self.info.vocab) for _ in range(prompt))
        request = Request(id=f"bench-{self._made}", prompt=tokens, sampling=GREEDY, max_tokens=answer)
        self.scheduler.add(request, now=time.monotonic())
        return request

    def step(self) -> Timed:
        """Schedules, runs and completes one step."""
        begin = time.perf_counter()
        plan = self.scheduler.schedule(now=time.monotonic())
        session = self.team.session
        if self.elsewhere is not None:
            self.elsewhere.prepare(session)
        results, stats = session.step(plan.work, remote=self.elsewhere)
        updates = self.scheduler.complete(plan, results, now=time.monotonic())
        seconds = time.perf_counter() - begin
        for update in updates:
            if update.fault is not None:
                raise update.fault
        sampled = [row.token for result in results for row in result.rows]
        return Timed(seconds, plan.rows, stats, len(set(sampled)) / len(sampled) if sampled else 1.0)

    def finish(self) -> None:
        """Calls off what still runs."""
        for request_id in list(self.scheduler.requests):
            self.scheduler.abort(request_id)


@contextmanager
def opened(path: Path, config: BenchConfig, *, streams: int, tokens: int, split_down: bool = False) -> Iterator[Bench]:
    """A bench with room for `streams` sequences of `tokens` tokens each. split_down: experts' outputs are kept apart, as nodes need it."""
    options = SessionOptions(
        max_rows=max(config.max_rows, streams),
        max_seqs=streams,
        max_logit_rows=streams,
        kv_blocks=streams * (-(-tokens // KV_BLOCK) + 1),
        kv_format=KV_FORMATS[config.kv_format],
        split_down=int(split_down),
    )
    team_config = TeamConfig(
        load_mode=config.load,
        workers_per_node=config.workers_per_node,
        threads_per_worker=config.threads_per_worker,
        session=options,
    )
    with Team.open(path, team_config) as team:
        calm_collector()  # as the server does
        yield Bench(team, options, config.seed)


def bench_prefill(path: Path, config: BenchConfig, *, tokens: int, meter: Meter, limits: MachineLimits) -> Row:
    """Prompt tokens a second of one request of `tokens` tokens, chunked as the service chunks it."""
    samples, timed = [], []
    with opened(path, config, streams=1, tokens=tokens + 1) as bench:
        for index in range(config.samples + 1):
            request = bench.add(prompt=tokens, answer=1)
            steps = []
            while request.state is not State.FINISHED:
                steps.append(bench.step())
            if index:  # the first warms up
                samples.append(tokens / sum(step.seconds for step in steps))
                timed += steps
        limit = limit_tokens(bench.info, limits, min(tokens, config.max_rows), logit_rows=1)
        details = shares(timed) | {"read GB/s": statistics.median(meter.read())}
    return Row(f"prefill {tokens}", "tokens/s", tuple(samples), details | {"tokens": tokens}, limit)


def bench_decode(path: Path, config: BenchConfig, *, streams: int, prompt: int, meter: Meter, limits: MachineLimits) -> Row:
    """Generated tokens a second over `streams` concurrent requests, once all of them decode. The limit is that of the reading speed found
    before and after."""
    answer = _WARM_STEPS + config.samples * BURST_STEPS + streams + 2
    with opened(path, config, streams=streams, tokens=prompt + answer) as bench:
        all_decode(bench, streams=streams, prompt=prompt, answer=answer)
        before = meter.read()
        for _ in range(_WARM_STEPS):
            bench.step()
        bursts = [[bench.step() for _ in range(BURST_STEPS)] for _ in range(config.samples)]
        found = replace(limits, read_gb_s=statistics.median([*before, *meter.read()]))
        timed = [step for burst in bursts for step in burst]
        bench.finish()
        info = bench.info
    samples = tuple(sum(step.rows for step in burst) / sum(step.seconds for step in burst) for burst in bursts)
    details = shares(timed) | {"distinct": statistics.fmean(step.distinct for step in timed), "read GB/s": found.read_gb_s}
    if streams == 1:
        details["moved GB/s"] = statistics.median(samples) * info.active_bytes / 1e9
    limit = limit_tokens(info, found, streams, logit_rows=streams)
    return Row(f"decode {streams}", "tokens/s", samples, details | {"streams": streams}, limit)


def bench_latency(path: Path, config: BenchConfig, *, tokens: int, prompt: int) -> Row:
    """Milliseconds between the tokens of one stream."""
    answer = _WARM_STEPS + tokens + 2
    with opened(path, config, streams=1, tokens=prompt + answer) as bench:
        room = bench.info.max_context - prompt - _WARM_STEPS - 2
        if tokens > room:
            raise BenchError(f"{tokens} tokens behind a prompt of {prompt} do not fit the model's context; {room} do")
        all_decode(bench, streams=1, prompt=prompt, answer=answer)
        for _ in range(_WARM_STEPS):
            bench.step()
        timed = [bench.step() for _ in range(tokens)]
        bench.finish()
    samples = [step.seconds * 1e3 for step in timed]
    middle, tail = percentile(samples, 0.5), percentile(samples, 0.99)
    details = {"p50": middle, "p99": tail, "p99/p50": tail / middle, "deviation": statistics.pstdev(samples), "most": max(samples)}
    return Row(f"token of {tokens}", "ms", tuple(samples), details | shares(timed))


def all_decode(bench: Bench, *, streams: int, prompt: int, answer: int) -> None:
    """Adds requests and steps until every one has its first token."""
    requests = [bench.add(prompt=prompt, answer=answer) for _ in range(streams)]
    while any(request.state is not State.DECODE for request in requests):
        bench.step()


def shares(steps: Sequence[Timed]) -> dict[str, float]:
    """How the steps' time was spent: waiting for lanes, alone between phases, in Python."""
    wall = sum(step.seconds for step in steps)
    inside = sum(step.stats.step_ns for step in steps) / 1e9
    return {
        "lanes": float(steps[-1].stats.lanes),
        "wait": sum(step.stats.wait_ns for step in steps) / 1e9 / wall,
        "serial": sum(step.stats.serial_ns for step in steps) / 1e9 / wall,
        "python": (wall - inside) / wall,
    }
