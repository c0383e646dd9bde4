"""What a step moves and computes, on a model small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_c import Model, ModelInfo
from ops.bench.limits import MachineLimits, distinct_experts, limit_tokens, step_bytes, step_ops
from ops.random_model import ModelShape, make_model

SHAPE = ModelShape(layers=2, hidden=64, heads=2, kv_heads=1, ffn=32, experts=4, top_k=2, vocab=64, tokenizer=False)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    path = tmp_path_factory.mktemp("limits") / "m.colibri"
    make_model(path, SHAPE, quant="int8")
    with Model.open(path) as model:
        return model.info


def test_one_row_chooses_top_k_and_many_choose_all() -> None:
    assert distinct_experts(8, 2, 1) == pytest.approx(2)
    assert distinct_experts(8, 2, 2) == pytest.approx(3.5)
    assert distinct_experts(8, 2, 1000) == pytest.approx(8)
    assert distinct_experts(1, 1, 5) == pytest.approx(1)


def test_one_token_reads_the_active_bytes_and_many_everything_but_the_embedding(info: ModelInfo) -> None:
    assert step_bytes(info, 1) == pytest.approx(info.active_bytes)
    inactive = info.expert_bytes * (1 - SHAPE.top_k / SHAPE.experts)
    assert step_bytes(info, 10_000) == pytest.approx(info.active_bytes + inactive)


def test_operations_are_two_a_weight_used(info: ModelInfo) -> None:
    attention = 64 * (64 + 32 + 32) + 64 * 64
    experts = 2 * 3 * 64 * 32
    assert step_ops(info, 1, logit_rows=0) == 2 * 2 * (attention + experts)
    assert step_ops(info, 3, logit_rows=1) == 3 * step_ops(info, 1, logit_rows=0) + 2 * 64 * 64


def test_the_slower_of_reading_and_arithmetic_limits(info: ModelInfo) -> None:
    slow_memory = MachineLimits(lanes=1, read_gb_s=1e-3, read_one_gb_s=1e-3, peak_gops={"int8": 1e6})
    assert limit_tokens(info, slow_memory, 1, logit_rows=1) == pytest.approx(1e6 / info.active_bytes)
    slow_arithmetic = replace(slow_memory, read_gb_s=1e6, peak_gops={"int8": 1e-3, "bf16": 5.0})
    assert limit_tokens(info, slow_arithmetic, 4, logit_rows=4) == pytest.approx(4e6 / step_ops(info, 4, logit_rows=4))
    unknown = replace(slow_memory, peak_gops={})
    assert limit_tokens(info, unknown, 1, logit_rows=1) == pytest.approx(1e6 / info.active_bytes)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    path = tmp_path_factory.mktemp("limits") / "mixed.colibri"
    make_model(path, SHAPE, quant="int8", head="bf16")
    with Model.open(path) as model:
        return model.info


def test_a_head_of_its_own_format_counts_by_its_own_bytes(info: ModelInfo, mixed: ModelInfo) -> None:
    assert mixed.active_bytes - info.active_bytes == 64 * 64 * (16 - 8.5) / 8
    assert step_bytes(mixed, 3) - step_bytes(info, 3) == pytest.approx(mixed.active_bytes - info.active_bytes)


def test_a_head_of_its_own_format_computes_at_its_own_peak(mixed: ModelInfo) -> None:
    slow = MachineLimits(lanes=1, read_gb_s=1e6, read_one_gb_s=1e6, peak_gops={"int8": 2e-3, "bf16": 1e-3})
    seconds = step_ops(mixed, 4, logit_rows=0) / 2e6 + 4 * 2 * 64 * 64 / 1e6
    assert limit_tokens(mixed, slow, 4, logit_rows=4) == pytest.approx(4 / seconds)
