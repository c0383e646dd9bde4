"""Whole models with the families' routers, of random weights, against the float64 reference; and the same bits however they are run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine_c
from ops.random_model import ModelShape, make_model
from tests.golden import harness, reference

BOUND = 2e-5  # of f32 logits, in units of max|logit|; measured up to 1e-6
TOKENS = np.random.default_rng(5).integers(0, 150, 61).tolist()

BASE = ModelShape(layers=3, hidden=72, heads=4, kv_heads=2, ffn=50, experts=16, top_k=4, vocab=150, head_dim=24, max_context=128)
SHARES: Mapping[str, Any] = {"weight": "unbiased_score", "renorm": "sum"}
GROUPS: Mapping[str, Any] = {"n_group": 4, "topk_group": 2, "group_metric": "sum_top2", "group_mask": "minus_inf"}
BY_MAX: Mapping[str, Any] = {"n_group": 8, "topk_group": 3, "group_metric": "max", "group_mask": "zero"}
SHAPES = {
    "olmoe": replace(BASE, router={"weight": "unbiased_score"}),
    "gpt-oss": replace(BASE, router_bias=True, router={"score": "logits"}),
    "deepseek v2": replace(BASE, router={"weight": "unbiased_score", "scale": 2.0, **BY_MAX}),
    "deepseek v3": replace(
        BASE, router_select_bias=True, router={"score": "sigmoid", **SHARES, **GROUPS, "renorm_eps": 1e-20, "scale": 2.5}
    ),
    "mistral 4": replace(BASE, router={**SHARES, **GROUPS, "group_mask": "zero", "renorm_eps": 1e-20}),
    "ernie": replace(BASE, router_select_bias=True, router={**SHARES, "renorm_eps": 1e-12, "renorm_way": "clamp"}),
    "lfm2": replace(BASE, router_select_bias=True, router={"score": "sigmoid", **SHARES, "renorm_eps": 1e-6}),
    "deepseek v4": replace(BASE, router_select_bias=True, router={"score": "sqrt_softplus", **SHARES, "scale": 1.5}),
    "phimoe": replace(BASE, top_k=2, router={"score": "logits", "weight": "sparsemixer", "jitter_eps": 0.25}),
    "llama 4": replace(BASE, top_k=1, router={"score": "logits", "weight": "sigmoid_chosen", "apply_at": "input"}),
    "gemma 4": replace(BASE, router_expert_scale=True, router={**SHARES, "input": "residual"}),
    "weights at the input of several": replace(BASE, router={"score": "sigmoid", **SHARES, "apply_at": "input"}),
    "everything at once": replace(
        BASE,
        router_bias=True, router_select_bias=True, router_expert_scale=True,
        router={"score": "sigmoid", **SHARES, **GROUPS, "scale": 1.5, "apply_at": "input", "input": "residual"},
    ),
}  # fmt: skip


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> ModelShape:
    return SHAPES[str(request.param)]


def run(path: Path, *, lanes: int = 0, chunk: int = 61) -> harness.Trace:
    with harness.threads(path, lanes=lanes) as session:
        return harness.run(session, TOKENS, chunk=chunk, seed=1)


@pytest.mark.parametrize("quant", ["f32", "int8"])
def test_logits_equal_the_reference(tmp_path: Path, shape: ModelShape, quant: str) -> None:
    path = tmp_path / "m.colibri"
    make_model(path, shape, quant=quant, seed=7)
    trace = run(path)
    expected = reference.forward(reference.from_container(path), TOKENS, routes=trace.experts)
    if quant == "f32":
        assert expected.regret < 1e-5, "others were chosen"
        assert harness.distance(trace.logits, expected.logits) < BOUND
        np.testing.assert_allclose(trace.weights, expected.weights, rtol=2e-5, atol=2e-6)
    else:
        assert harness.error(trace.logits, expected.logits) < 5e-2  # activations on a rounding boundary: test_parity_quantised


def test_router_makes_a_difference(tmp_path: Path, shape: ModelShape) -> None:
    """The same weights without what the descriptor says give other logits: nothing of it is ignored."""
    plain = replace(shape, router={}, router_bias=False, router_select_bias=False, router_expert_scale=False)
    for name, of in (("this", shape), ("plain", plain)):
        make_model(tmp_path / name, of, quant="f32", seed=7)
    assert harness.distance(run(tmp_path / "this").logits, run(tmp_path / "plain").logits) > 1e-3


def test_bits_depend_on_neither_batch_nor_lanes_nor_instruction_set(tmp_path: Path, shape: ModelShape) -> None:
    path, chosen = tmp_path / "m.colibri", engine_c.isa_name()
    make_model(path, shape, quant="int4", seed=7)
    whole = run(path).bits()
    for lanes, chunk in ((0, 1), (0, 7), (2, 16), (3, 33)):
        assert run(path, lanes=lanes, chunk=chunk).bits() == whole, (lanes, chunk)
    try:
        for isa in engine_c.isa_available():
            engine_c.isa_select(isa)
            assert run(path, lanes=1).bits() == whole, isa
    finally:
        engine_c.isa_select(chosen)


def test_split_down_has_the_same_bits(tmp_path: Path, shape: ModelShape) -> None:
    path = tmp_path / "m.colibri"
    make_model(path, shape, quant="int8", seed=7)
    whole = run(path)
    with engine_c.Model.open(path) as model, engine_c.Session(model, replace(harness.options(), split_down=1)) as session:
        assert harness.run(session, TOKENS, chunk=61, seed=1).bits() == whole.bits()
