"""What a machine can do at most with a model: a step's bytes and operations against reading speed and arithmetic peak. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_c import FORMATS, ModelInfo

PEAK_OF = {FORMATS["f32"]: "f32", FORMATS["bf16"]: "bf16", FORMATS["int8"]: "int8", FORMATS["int4"]: "int8"}
"""What a weight format is multiplied with."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured on the cores that compute. 1 GB/s is 1e9 bytes a second, 1 GOP/s 1e9 multiplications or additions."""

    lanes: int
    read_gb_s: float  # all lanes' cores together
    read_one_gb_s: float  # one core alone
    peak_gops: dict[str, float] = field(default_factory=dict)  # "f32", "bf16", "int8" of all lanes' cores


def distinct_experts(experts: int, top_k: int, rows: int) -> float:
    """Experts of a layer that `rows` tokens choose at least once, on average, if each chooses evenly and by itself."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def step_bytes(info: ModelInfo, rows: int) -> float:
    """Weight bytes that a step of `rows` tokens reads at least. Keys, values and activations are not counted."""
    one = info.expert_bytes / (info.layers * info.experts)
    shared = info.active_bytes - info.layers * info.top_k * one
    return shared + info.layers * one * distinct_experts(info.experts, info.top_k, rows)


def step_ops(info: ModelInfo, rows: int, *, logit_rows: int) -> float:
    """Multiplications and additions of a step's matrix products. Attention over the context is not counted."""
    attention = info.hidden * info.head_dim * (2 * info.heads + 2 * info.kv_heads)
    layer = attention + 3 * info.hidden * info.ffn * info.top_k
    return 2.0 * (rows * info.layers * layer + logit_rows * info.vocab * info.hidden)


def limit_tokens(info: ModelInfo, limits: MachineLimits, rows: int, *, logit_rows: int) -> float:
    """Tokens a second of steps of `rows` tokens if all that bound them were reading or arithmetic, whichever takes longer."""
    reading = step_bytes(info, rows) / (limits.read_gb_s * 1e9)
    layers = step_ops(info, rows, logit_rows=0)
    head = step_ops(info, rows, logit_rows=logit_rows) - layers
    computing = _seconds(layers, info.expert_format, limits) + _seconds(head, info.head_format, limits)
    return rows / max(reading, computing)


def _seconds(ops: float, weights: int, limits: MachineLimits) -> float:
    """Of products with weights of that format; none if its peak was not measured."""
    peak = limits.peak_gops.get(PEAK_OF[weights])
    return ops / (peak * 1e9) if peak else 0.0
