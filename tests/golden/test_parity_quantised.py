"""bf16, int8 and int4 weights (and bf16 KV) against their own dequantised weights in float64.

Two references. *Rounded* rounds activations as the engine says it does (kernels.h); only float32 summation is left, about 1e-7. But
that tips the rare activation that lies on a rounding boundary the other way, by a whole step of 8 bits, and what follows it differs by
some of the rounding's whole cost. So most rows must agree to float32, and all of them within the cost. *Plain* keeps its activations in
float64: the difference is that cost.
"""

from __future__ import annotations

import numpy as np
import pytest

import engine_c
from tests.golden import harness, reference
from tests.golden.harness import Containers

CASES = [("f32", "bf16"), *((quant, kv) for quant in ("bf16", "int8", "int4") for kv in ("f32", "bf16"))]
# A head of another format than the linears: the smallest under each of them, and the largest over the smallest.
HEADS = ("int4 head int4", "int8 head int4", "bf16 head int4", "f32 head int4", "int4 head bf16", "int4 head f32")
# Share of rows of three-token prompts within EXACT of max|logit|. Measured, the worst checkpoint: 0.94, 0.85, 0.77, 0.95 (noise of 3e-8
# put on float64 activations gives such figures too). A wrong scale, offset or rounding rule leaves none.
EXACT = 5e-6
EXACT_SHARE = {"f32": 0.85, "bf16": 0.75, "int8": 0.65, "int4": 0.85}
# Relative root mean square error of a whole prompt's logits. Measured, the worst checkpoint: rounded 2.3e-4, 2.4e-3, 2.3e-2, 1.2e-2; plain
# 6.5e-3 (bf16 keys and values), 1.2e-2, 3.5e-2, 5.5e-2.
ROUNDED_BOUND = {"f32": 1e-3, "bf16": 5e-3, "int8": 4e-2, "int4": 4e-2}
PLAIN_BOUND = {"f32": 1.5e-2, "bf16": 2.5e-2, "int8": 6e-2, "int4": 1e-1}
# How far below the best a chosen expert's gate logit may lie (their standard deviation is about 2). Measured: 0, 0, 0.11, 0.
REGRET_BOUND = {"f32": 1e-2, "bf16": 2e-2, "int8": 0.2, "int4": 0.2}


@pytest.mark.parametrize(("quant", "kv_format"), CASES)
@pytest.mark.parametrize("name", harness.NAMES)
def test_format_equals_its_dequantised_weights(name: str, quant: str, kv_format: str, container: Containers) -> None:
    path, tokens = container(name, quant), harness.vectors(name).tokens
    model = reference.from_container(path, kv_format=kv_format)
    with harness.threads(path, lanes=0, kv_format=kv_format) as session:
        trace = harness.run(session, tokens, chunk=16)
        share = exact_share(session, model, tokens)
    rounded = reference.forward(model, tokens, routes=trace.experts)
    plain = reference.forward(model.exact(), tokens, routes=trace.experts)
    assert share >= EXACT_SHARE[quant]
    assert harness.error(trace.logits, rounded.logits) < ROUNDED_BOUND[quant]
    assert harness.error(trace.logits, plain.logits) < PLAIN_BOUND[quant]
    assert rounded.regret < REGRET_BOUND[quant]


def exact_share(session: engine_c.Session, model: reference.Model, tokens: harness.I32) -> float:
    """Share of rows that agree to float32, over the prompt cut into prompts of three tokens."""
    runs = harness.place([tokens[i : i + 3].tolist() for i in range(0, len(tokens) - 2, 3)])
    harness.step(session, [(run, 3) for run in runs])
    rows = []
    for run in runs:
        trace = run.trace()
        expected = reference.forward(model, run.tokens, routes=trace.experts).logits
        rows += (np.abs(trace.logits - expected).max(axis=1) < EXACT * np.abs(expected).max()).tolist()
    return float(np.mean(rows))


@pytest.mark.parametrize("quant", HEADS)
@pytest.mark.parametrize("name", harness.NAMES)
def test_a_head_of_its_own_format_equals_its_dequantised_weights(name: str, quant: str, container: Containers) -> None:
    """Tied and untied: with the tied one the embedding changes too, as the reference reads it from the file."""
    path, tokens = container(name, quant), harness.vectors(name).tokens
    linear, head = quant.split(" head ")
    model = reference.from_container(path)
    with harness.threads(path, lanes=0) as session:
        trace = harness.run(session, tokens, chunk=16)
        share = exact_share(session, model, tokens)
    assert (model.rounding["expert"], model.rounding["head"]) == (linear, head)
    rounded = reference.forward(model, tokens, routes=trace.experts)
    plain = reference.forward(model.exact(), tokens, routes=trace.experts)
    assert share >= min(EXACT_SHARE[linear], EXACT_SHARE[head])
    assert harness.error(trace.logits, rounded.logits) < max(ROUNDED_BOUND[linear], ROUNDED_BOUND[head])
    assert harness.error(trace.logits, plain.logits) < max(PLAIN_BOUND[linear], PLAIN_BOUND[head])


@pytest.mark.parametrize("name", harness.NAMES)
def test_bf16_weights_that_were_bf16_cost_only_the_activations(name: str, container: Containers) -> None:
    """Conversion of a bf16 checkpoint to bf16 is exact: greedy tokens stay, logits differ by the rounding of activations alone."""
    vectors = harness.vectors(name)
    source = reference.from_checkpoint(harness.MODELS / name)
    stored = reference.from_container(container(name, "bf16"))
    exact = name not in ("all-experts", "old-config")  # those two are f32
    assert np.array_equal(source.embed, stored.embed) == exact
    with harness.threads(container(name, "bf16"), lanes=0) as session:
        trace = harness.run(session, vectors.tokens, chunk=64)
    if exact and np.array_equal(trace.experts, vectors.experts):
        assert harness.error(trace.logits, vectors.logits) < PLAIN_BOUND["bf16"]


@pytest.mark.parametrize("name", ["tied", "window"])
def test_an_int4_head_changes_only_the_head_and_what_is_tied_to_it(name: str, container: Containers) -> None:
    smaller, usual = (reference.from_container(container(name, quant)) for quant in ("int4 head int4", "int4"))
    assert not np.array_equal(smaller.head, usual.head)
    assert np.array_equal(smaller.embed, usual.embed) == (name != "tied")
    assert np.array_equal(smaller.layers[0].q, usual.layers[0].q)


@pytest.mark.parametrize(("quant", "bits"), [("f32", 32), ("bf16", 16), ("int8", 8.5), ("int4", 4.5)])
def test_container_holds_the_format_that_was_asked_for(quant: str, bits: float, container: Containers) -> None:
    with engine_c.Model.open(container("tied", quant)) as model:
        info = model.info
    head = "int8" if quant == "int4" else quant
    assert (info.expert_format, info.backbone_format, info.head_format) == tuple(engine_c.FORMATS[f] for f in (quant, quant, head))
    # 160 columns are whole groups, 176 are padded to 192: 2 layers of 6 experts, gate and up [2 x 192, 160], down [160, 192].
    assert info.expert_bytes == 2 * 6 * 3 * 192 * 160 * bits / 8
