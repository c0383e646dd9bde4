"""The float64 reference agrees with transformers' float32 vectors, so it may speak for shapes that have none."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden import harness, reference


@pytest.mark.parametrize("name", harness.NAMES)
def test_reference_equals_transformers(name: str) -> None:
    vectors = harness.vectors(name)
    result = reference.forward(reference.from_checkpoint(harness.MODELS / name), vectors.tokens)
    # Measured 0.8e-6 to 2.1e-6: float32 rounding in transformers.
    assert harness.distance(result.logits, vectors.logits) < 5e-6
    np.testing.assert_array_equal(result.experts, vectors.experts)
    np.testing.assert_allclose(result.weights, vectors.weights, atol=5e-6)


@pytest.mark.parametrize("name", harness.NAMES)
def test_vectors_have_no_near_ties(name: str) -> None:
    vectors = harness.vectors(name)
    whole = np.concatenate([vectors.tokens, vectors.greedy])
    result = reference.forward(reference.from_checkpoint(harness.MODELS / name), whole)
    assert result.gap > 1e-4
    steps = result.logits[len(vectors.tokens) - 1 : -1]
    np.testing.assert_array_equal(steps.argmax(axis=-1), vectors.greedy)
    top2 = np.sort(steps)[:, -2:]
    assert np.min(top2[:, 1] - top2[:, 0]) > 1e-3 * np.abs(vectors.logits).max()


def test_rounding_keeps_a_group_within_half_a_step() -> None:
    x = np.random.default_rng(0).normal(size=(7, 75)) * np.logspace(-3, 3, 75)
    for start in range(0, 75, reference.GROUP):
        group = slice(start, start + reference.GROUP)
        amax = np.abs(x[:, group]).max(axis=-1, keepdims=True)
        for fmt, step in (("int8", amax / 127), ("int4", amax * 2 / 127)):
            error = np.abs(reference.round_to(fmt, x)[:, group] - x[:, group])
            assert np.all(error <= step / 2 * (1 + 1e-6))
    assert np.all(np.abs(reference.round_to("bf16", x) - x) <= np.abs(x) / 256)
