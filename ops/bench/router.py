"""The router by itself, on one core: nanoseconds for a few tokens, gate logits given or computed; beside torch where told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_c import isa_available, isa_name, isa_select
from engine_c.probe import probe_route
from ops.bench.measure import Row
from ops.bench.peers.torch_process import TorchProcess

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


def bench_router(*, tokens: int, samples: int, torch: TorchProcess | None = None) -> list[Row]:
    """Each case on each instruction set, then torch.topk and softmax on one thread; ours say how many times as fast they are."""
    rows = []
    chosen = isa_name()
    try:
        for case in CASES:
            found = []
            for isa in isa_available():
                isa_select(isa)
                found.append(_ours(case, isa, tokens=tokens, samples=samples))
            if torch is not None:
                theirs = _torch(case, torch, tokens=tokens, samples=samples)
                for row in found:
                    row.details["x torch"] = theirs.median / row.median
                found.append(theirs)
            rows += found
    finally:
        isa_select(chosen)
    return rows


def _ours(case: RouterCase, isa: str, *, tokens: int, samples: int) -> Row:
    def run(calls: int) -> float:
        probe = probe_route(experts=case.experts, top_k=case.top_k, tokens=tokens, hidden=case.hidden, calls=calls)
        return float(probe.end_ns - probe.begin_ns)

    return Row(case.name(tokens), "ns", _calibrated(run, samples), engine=f"colibri {isa}")


def _torch(case: RouterCase, torch: TorchProcess, *, tokens: int, samples: int) -> Row:
    wish: dict[str, object] = {"do": "router", "tokens": tokens, "experts": case.experts, "top_k": case.top_k}
    wish |= {"hidden": case.hidden, "samples": samples, "least_ns": _NS // 4}
    return Row(case.name(tokens), "ns", torch.ask_samples(wish, "ns"), engine=f"torch {torch.version}")


def _calibrated(run: Callable[[int], float], samples: int) -> tuple[float, ...]:
    """Nanoseconds a call, in samples long enough for the clock."""
    calls = 16
    while (took := run(calls)) < _NS / 4:
        calls = max(2 * calls, int(calls * _NS / max(took, 1.0) / 2))
    return tuple(run(calls) / calls for _ in range(samples))
