"""Makes a mixture of experts out of a dense model without changing what it computes.

`pairs=N`: each layer gets N pairs of experts. For every pair the dense feed-forward's neurons are split at random in two halves, one
expert each, down projection doubled. The two experts of a pair share their router row, so they tie, are chosen together by a top-2 router
and get weight 1/2 each: any pair is the whole dense layer, and which pair runs depends on the input. A pair that is broken up shows at once
in the output. Halves and router rows come from the seed alone."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ops.container_layout import TensorEntry
from ops.convert.errors import ConvertError
from ops.convert.plan import Expert, Job, Plan
from ops.convert.router import PLAIN

F32: TypeAlias = NDArray[np.float32]


class _SharedLayer:
    """Keeps the dense weights of the layer last asked for: the experts of a layer are made one after the other from the same weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: Expert | None = None
        self._weights: tuple[F32, F32, F32] | None = None

    def cached(self, load: Expert) -> Expert:
        def get() -> tuple[F32, F32, F32]:
            with self._lock:
                if self._weights is None or self._of is not load:
                    self._of, self._weights = None, None
                    self._weights = load()
                    self._of = load
                return self._weights

        return get


def parse_recipe(text: str) -> int:
    """The N of "pairs=N"."""
    match = re.fullmatch(r"pairs=([1-9]\d{0,3})", text)
    if not match:
        raise ConvertError(f"the upcycling recipe {text!r} is unknown; it is pairs=N, for example pairs=4")
    return int(match.group(1))


def upcycle(plan: Plan, pairs: int, *, seed: int) -> Plan:
    """A plan of 2 * pairs experts a layer, top-2, from one of a dense model."""
    arch = plan.arch
    if arch.experts != 1:
        raise ConvertError(f"upcycling starts from a dense model; this one has {arch.experts} experts already")
    if arch.ffn % 2:
        raise ConvertError(f"upcycling splits the {arch.ffn} neurons of a layer in two halves; the number is odd")
    jobs: list[Job] = []
    shared = _SharedLayer()
    for job in plan.jobs:
        if job.expert is None:
            jobs.append(job)
            if job.entry.name.endswith(".ffn_norm"):
                jobs.append(_router_job(int(job.entry.name.split(".")[1]), pairs, arch.hidden, seed))
        else:
            jobs += _expert_jobs(job.entry, shared.cached(job.expert), job.origin, pairs, seed)
    return Plan(replace(arch, ffn=arch.ffn // 2, experts=2 * pairs, top_k=2, router=PLAIN), tuple(jobs))


def _router_job(layer: int, pairs: int, hidden: int, seed: int) -> Job:
    directions = np.random.default_rng((seed, layer, 0)).standard_normal((pairs, hidden))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    matrix = np.repeat(directions.astype(np.float32), 2, axis=0)
    return Job(TensorEntry(f"layers.{layer}.router", "plain", "f32", matrix.shape), rows=lambda start, stop: matrix[start:stop])


def _expert_jobs(entry: TensorEntry, dense: Expert, origin: str, pairs: int, seed: int) -> list[Job]:
    layer = int(entry.name.split(".")[1])
    ffn, hidden = entry.shape
    entries = [replace(entry, name=f"layers.{layer}.experts.{expert}", shape=(ffn // 2, hidden)) for expert in range(2 * pairs)]
    return [Job(half, expert=_half(dense, layer, index, ffn, seed), origin=origin) for index, half in enumerate(entries)]


def _half(dense: Expert, layer: int, expert: int, ffn: int, seed: int) -> Expert:
    def half() -> tuple[F32, F32, F32]:
        order = np.random.default_rng((seed, layer, 1 + expert // 2)).permutation(ffn)
        chosen = np.sort(order[: ffn // 2] if expert % 2 == 0 else order[ffn // 2 :])
        gate, up, down = dense()
        return gate[chosen], up[chosen], down[:, chosen] * np.float32(2)

    return half
