"""The router by itself, on one core: nanoseconds for a few tokens, gate logits given or computed; beside torch where installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine_c import isa_available, isa_name, isa_select
from engine_c.probe import probe_route
from ops.bench.measure import Row

_NS = 20_000_000  # least length of one sample


@dataclass(frozen=True, slots=True)
class RouterCase:
    """top_k of experts; hidden 0: gate logits given."""

    experts: int
    top_k: int
    hidden: int = 0

    def name(self, tokens: int) -> str:
        """For people."""
        gate = f", gate of {self.hidden} included" if self.hidden else ""
        return f"top {self.top_k} of {self.experts}, {tokens} tokens{gate}"


CASES = (RouterCase(8, 2), RouterCase(8, 2, 1024), RouterCase(16, 2), RouterCase(64, 8), RouterCase(64, 8, 2048), RouterCase(128, 8))


def bench_router(*, tokens: int, samples: int) -> list[Row]:
    """Each case on each instruction set; torch.topk and softmax on one thread as another engine, if torch is installed."""
    rows = []
    chosen = isa_name()
    try:
        for case in CASES:
            for isa in isa_available():
                isa_select(isa)
                rows.append(_ours(case, isa, tokens=tokens, samples=samples))
            if importlib.util.find_spec("torch") is not None:
                rows.append(_torch(case, tokens=tokens, samples=samples))
    finally:
        isa_select(chosen)
    return rows


def _ours(case: RouterCase, isa: str, *, tokens: int, samples: int) -> Row:
    def run(calls: int) -> float:
        probe = probe_route(experts=case.experts, top_k=case.top_k, tokens=tokens, hidden=case.hidden, calls=calls)
        return float(probe.end_ns - probe.begin_ns)

    return Row(case.name(tokens), "ns", _calibrated(run, samples), engine=f"colibri {isa}")


def _torch(case: RouterCase, *, tokens: int, samples: int) -> Row:
    import torch

    torch.set_num_threads(1)
    logits, gate = torch.randn(tokens, case.experts), torch.randn(case.experts, case.hidden or 1)
    x = torch.randn(tokens, case.hidden or 1)

    def run(calls: int) -> float:
        begin = time.perf_counter_ns()
        with torch.inference_mode():
            for _ in range(calls):
                values, _experts = torch.topk(x @ gate.T if case.hidden else logits, case.top_k, dim=-1)
                torch.softmax(values, dim=-1)
        return float(time.perf_counter_ns() - begin)

    return Row(case.name(tokens), "ns", _calibrated(run, samples), engine="torch")


def _calibrated(run: Callable[[int], float], samples: int) -> tuple[float, ...]:
    """Nanoseconds a call, in samples long enough for the clock."""
    calls = 16
    while (took := run(calls)) < _NS / 4:
        calls = max(2 * calls, int(calls * _NS / max(took, 1.0) / 2))
    return tuple(run(calls) / calls for _ in range(samples))
