"""Shapes the vectors do not cover, drawn at random, against the float64 reference: experts x k, heads, and sizes that fill no tile."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ops.convert import convert
from ops.random_model import ModelShape, make_model
from tests.golden import harness, reference
from tests.golden.harness import Shape

FORMATS = ("f32", "bf16", "int8", "int4")
# In units of max|logit|. f32 is float32 rounding: measured up to 1.5e-6. The others differ by as little (median 5e-8 to 2e-7) until an
# activation on a rounding boundary falls the other way (test_parity_quantised): up to 3.5e-3, 6.3e-3 and 1.6e-2.
WHOLE_BOUND = {"f32": 2e-5, "bf16": 2e-2, "int8": 5e-2, "int4": 5e-2}
# The median of twelve prompts of one token: most meet no such boundary. Measured up to 7e-7.
SINGLE_BOUND = 5e-6
# Of gate logits (how far below the best a choice may lie) and of weights. Measured 3e-7 in f32, 1.4e-3 otherwise.
ROUTE_BOUND = {"f32": 5e-6, "bf16": 1e-2, "int8": 5e-2, "int4": 5e-2}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    experts = draw(st.integers(1, 20))
    return Shape(
        hidden=draw(st.integers(2, 130)),
        ffn=draw(st.integers(1, 100)),
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 4)),
        group=draw(st.integers(1, 5)),
        head_dim=2 * draw(st.integers(1, 40)),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 10))),
        vocab=draw(st.integers(2, 150)),
        window=draw(st.one_of(st.just(0), st.integers(1, 40))),
        tied=draw(st.booleans()),
    )


def check(shape: Shape, quant: str, seed: int, rows: int) -> None:
    """Converts a random checkpoint of this shape and holds what the engine makes of it against the reference."""
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "checkpoint", Path(folder) / "model.colibri"
        harness.write_checkpoint(source, shape.config(), shape.tensors(seed))
        convert(source, path, quant=quant, upcycle=None, descriptor=None, progress=None)
        # f32 is held against the checkpoint itself, so that a converter's mistake shows; the others against what was stored.
        model = reference.from_checkpoint(source) if quant == "f32" else reference.from_container(path)
        tokens = np.random.default_rng(seed).integers(0, shape.vocab, rows).tolist()
        with harness.threads(path, lanes=0) as session:
            whole = harness.run(session, tokens, chunk=max(1, rows // 2), seed=seed)
            assert harness.run(session, tokens, chunk=rows).bits() == whole.bits()
            single = harness.place([[token] for token in tokens[:12]])
            harness.step(session, [(run, 1) for run in single])
    assert compare(model, tokens, whole, quant) < WHOLE_BOUND[quant]
    assert np.median([compare(model, run.tokens, run.trace(), quant) for run in single]) < SINGLE_BOUND
    assert all(len(set(row)) == shape.top_k for row in whole.experts.reshape(-1, shape.top_k).tolist())


def compare(model: reference.Model, tokens: Sequence[int], trace: harness.Trace, quant: str) -> float:
    """The distance of the logits; routes and weights are asserted."""
    routes = trace.experts if len(trace.experts) else None  # the converter leaves a router out that has one expert to choose from
    expected = reference.forward(model, tokens, routes=routes)
    assert expected.regret < ROUTE_BOUND[quant]
    if routes is not None:
        np.testing.assert_allclose(trace.weights, expected.weights, rtol=0, atol=ROUTE_BOUND[quant])
    return harness.distance(trace.logits, expected.logits)


@pytest.mark.parametrize("quant", FORMATS)
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(shape=shapes(), seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 50))
def test_random_shapes_equal_the_reference(quant: str, shape: Shape, seed: int, rows: int) -> None:
    check(shape, quant, seed, rows)


@pytest.mark.parametrize("experts", [1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 64])
def test_every_number_of_experts_with_every_kind_of_k(experts: int) -> None:
    """k = 1, 2, a general one and all; on both sides of the SIMD path's 16 experts."""
    for top_k in sorted({1, min(2, experts), min(3, experts), (experts + 1) // 2, experts}):
        check(Shape(40, 24, 1, 1, 2, 16, experts, top_k, 50, 0, False), "f32", seed=experts * 100 + top_k, rows=33)


@st.composite
def featured(draw: st.DrawFn) -> ModelShape:
    """Everything a container may hold, Mixtral or not: partial and interleaved rotary, biases, norms of queries and keys, plain scores."""
    kv_heads, experts = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    head_dim = 2 * draw(st.integers(1, 24))
    return ModelShape(
        layers=draw(st.integers(1, 3)),
        hidden=draw(st.integers(8, 100)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        ffn=draw(st.integers(8, 80)),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        vocab=draw(st.integers(2, 150)),
        head_dim=head_dim,
        sliding_window=draw(st.one_of(st.just(0), st.integers(1, 40))),
        rope_theta=draw(st.sampled_from([500.0, 1e4, 1e6])),
        rope_dims=2 * draw(st.integers(1, head_dim // 2)),
        rope_style=draw(st.sampled_from(["half", "interleaved"])),
        tied=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        router_bias=draw(st.booleans()),
        router={"weight": draw(st.sampled_from(["softmax_chosen", "unbiased_score"]))},
    )


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(shape=featured(), seed=st.integers(0, 2**31), rows=st.integers(1, 50))
def test_every_feature_of_a_container_equals_the_reference(shape: ModelShape, seed: int, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.colibri"
        make_model(path, shape, quant="f32", seed=seed)
        model = reference.from_container(path)
        tokens = np.random.default_rng(seed).integers(0, shape.vocab, rows).tolist()
        with harness.threads(path, lanes=0) as session:
            trace = harness.run(session, tokens, chunk=max(1, rows // 3), seed=seed)
    assert compare(model, tokens, trace, "f32") < WHOLE_BOUND["f32"]
