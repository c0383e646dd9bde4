"""What it costs that lanes are processes: the round trip of a phase, and the share of real steps spent waiting and alone."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from ops.bench.measure import Row
from ops.bench.steps import BenchConfig, Timed, all_decode, opened, shares
from ops.random_model import ModelShape, make_model

_STEPS = 64  # of one sample
_NOTHING = ModelShape(layers=8, hidden=32, heads=1, kv_heads=1, ffn=32, experts=2, top_k=1, vocab=64, tokenizer=False)
"""So small that a step is little but its phases."""


def bench_ipc(path: Path, config: BenchConfig, *, streams: list[int], prompt: int) -> list[Row]:
    """Microseconds of a phase of a model of almost nothing, alone and with the team; then of the given model, with where they went."""
    with tempfile.TemporaryDirectory(prefix="colibri-bench-") as folder:
        nothing = Path(folder) / "nothing.colibri"
        make_model(nothing, _NOTHING, quant="f32")
        alone = _phases("empty phase, front end alone", nothing, replace(config, workers_per_node=0), streams=1, prompt=1)
        team = _phases("empty phase, whole team", nothing, config, streams=1, prompt=1)
    team.details["round trip us"] = max(0.0, team.median - alone.median)
    return [alone, team, *(_phases(f"phase, {count} streams", path, config, streams=count, prompt=prompt) for count in streams)]


def _phases(case: str, path: Path, config: BenchConfig, *, streams: int, prompt: int) -> Row:
    answer = (config.samples + 1) * _STEPS + streams + 2
    with opened(path, config, streams=streams, tokens=prompt + answer) as bench:
        all_decode(bench, streams=streams, prompt=prompt, answer=answer)
        bursts = [[bench.step() for _ in range(_STEPS)] for _ in range(config.samples + 1)][1:]
        bench.finish()
    steps = [step for burst in bursts for step in burst]
    return Row(case, "us", tuple(_phase_us(burst) for burst in bursts), _per_phase(steps) | shares(steps))


def _phase_us(steps: list[Timed]) -> float:
    return sum(step.stats.step_ns for step in steps) / 1e3 / sum(step.stats.phases for step in steps)


def _per_phase(steps: list[Timed]) -> dict[str, float]:
    phases = sum(step.stats.phases for step in steps)
    return {
        "phases a step": statistics.fmean(step.stats.phases for step in steps),
        "tasks a step": statistics.fmean(step.stats.tasks for step in steps),
        "wait us": sum(step.stats.wait_ns for step in steps) / 1e3 / phases,
        "serial us": sum(step.stats.serial_ns for step in steps) / 1e3 / phases,
    }
