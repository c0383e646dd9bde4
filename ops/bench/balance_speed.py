"""What policies cost or gain in time: whole steps of a team of worker processes, as the service runs them, all policies in turn.

A round gives every policy the same steps of the traffic, one policy after the other, so that what is compared was measured within
milliseconds of each other; ratios are of a round, and their median is shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine_c import KV_BLOCK, KV_FORMATS, OPERATIONS, Damping, SeqWork, SessionOptions
from ops.bench.balance_traffic import CONTEXT, Traffic
from ops.bench.measure import BenchError, Row
from ops.bench.steps import BenchConfig
from service.collector import calm_collector
from workers.team import Team, TeamConfig

OFF = "off"
BURST = 16  # steps of a policy in a round
_WARM_ROUNDS = 2
_ROUTE = OPERATIONS.index("route")


@dataclass(frozen=True, slots=True)
class Burst:
    """Some steps under one policy."""

    tokens_s: float
    route_us: float  # of a step: choosing experts, damping included
    step_us: float  # inside the engine
    active: float  # experts of a layer that had a token


def random_traffic(vocab: int, *, streams: int, steps: int = 256, context: int = CONTEXT, seed: int = 1) -> Traffic:
    """Random tokens, for a model that has learnt nothing."""
    shape = (steps, streams)
    tokens = np.random.default_rng(seed).integers(0, vocab, shape, np.int32)
    positions = np.broadcast_to((np.arange(steps, dtype=np.int32) % context)[:, None], shape).copy()
    excerpts = (np.arange(steps)[:, None] // context * streams + np.arange(streams)).astype(np.int32)
    return Traffic("random", ("random",), tokens, np.roll(tokens, -1, axis=0), positions, excerpts, np.zeros(shape, np.int32))


def measure_speed(
    path: Path, traffic: Traffic, cases: Mapping[str, Damping], config: BenchConfig, *, rounds: int = 40, burst: int = BURST
) -> list[Row]:
    """The case without a policy first, then each of `cases`. EngineError, PlanError, SegmentError, SupervisorError, BenchError."""
    every: dict[str, Damping | None] = {OFF: None, **cases}
    found: dict[str, list[Burst]] = {name: [] for name in every}
    longest = int(traffic.positions.max()) + 1
    blocks = -(-longest // KV_BLOCK)
    options = SessionOptions(
        max_rows=max(config.max_rows, traffic.streams),
        max_seqs=traffic.streams,
        max_logit_rows=traffic.streams,
        kv_blocks=len(every) * traffic.streams * blocks,
        kv_format=KV_FORMATS[config.kv_format],
        max_slots=len(every) * traffic.streams,
    )
    team_config = TeamConfig(
        load_mode=config.load, workers_per_node=config.workers_per_node, threads_per_worker=config.threads_per_worker, session=options
    )
    with Team.open(path, team_config) as team:
        if longest > team.model.info.max_context:
            raise BenchError(f"excerpts of {longest} tokens do not fit the model's context of {team.model.info.max_context}")
        calm_collector()
        for number in range(_WARM_ROUNDS + rounds):
            rows = [step % traffic.steps for step in range(number * burst, (number + 1) * burst)]
            for turn in range(len(every)):
                index = (number + turn) % len(every)
                name = list(every)[index]
                done = _burst(team, traffic, rows, every[name], first=index * traffic.streams, blocks=blocks)
                if number >= _WARM_ROUNDS:
                    found[name].append(done)
    return [_row(name, bursts, found[OFF]) for name, bursts in found.items()]


def _burst(team: Team, traffic: Traffic, rows: Sequence[int], damping: Damping | None, *, first: int, blocks: int) -> Burst:
    """The policy's sequences, with slots and KV blocks of their own from number `first` on, go on by these rows of the traffic."""
    session, streams = team.session, traffic.streams
    slots = range(first, first + streams)
    parts = [range(slot * blocks, (slot + 1) * blocks) for slot in slots]
    work = [
        [SeqWork((token,), position, part, 1, damping=damping, slot=slot) for token, position, part, slot in zip(*columns, strict=True)]
        for columns in ((traffic.tokens[row].tolist(), traffic.positions[row].tolist(), parts, slots) for row in rows)
    ]
    before = session.telemetry().active_experts.sum()
    stats = []
    begin = time.perf_counter()
    for batch in work:
        results, stat = session.step(batch)
        stats.append(stat)
    seconds = time.perf_counter() - begin
    for result in results:
        if not result.ok:
            raise BenchError(result.error)
    active = int(session.telemetry().active_experts.sum() - before) / (len(work) * team.model.info.router_layers)
    return Burst(
        tokens_s=len(work) * streams / seconds,
        route_us=statistics.fmean(stat.op_ns[_ROUTE] for stat in stats) / 1e3,
        step_us=statistics.fmean(stat.step_ns for stat in stats) / 1e3,
        active=active,
    )


def _row(name: str, bursts: Sequence[Burst], off: Sequence[Burst]) -> Row:
    """Details: how many times as fast as off (median over rounds, and its quartiles), microseconds of the router and of the step, what the
    router takes longer as a share of the step without a policy, and active experts."""
    ratios = [own.tokens_s / than.tokens_s for own, than in zip(bursts, off, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    route = statistics.median(burst.route_us for burst in bursts)
    than, step = (statistics.median(getattr(burst, field) for burst in off) for field in ("route_us", "step_us"))
    details = {
        "x off": middle,
        "from": low,
        "to": high,
        "router us": route,
        "step us": statistics.median(burst.step_us for burst in bursts),
        "router +%": 100 * (route - than) / step,
        "active": statistics.fmean(burst.active for burst in bursts),
    }
    return Row(name, "tokens/s", tuple(burst.tokens_s for burst in bursts), details)
