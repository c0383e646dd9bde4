"""A dense model upcycled to pairs of experts answers as the dense model does: whatever pair the router picks is the whole dense FFN."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ops.convert import convert
from tests.golden import harness
from tests.golden.harness import Containers

# Splitting the FFN sum in two halves changes float32 rounding alone: measured 1e-6.
BOUND = 1e-5


@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_upcycled_model_equals_the_dense_one(pairs: int, container: Containers, tmp_path: Path) -> None:
    vectors = harness.vectors("dense-llama")
    path = tmp_path / "upcycled.colibri"
    convert(harness.MODELS / "dense-llama", path, quant="f32", upcycle=f"pairs={pairs}", descriptor=None, progress=None)
    with harness.threads(container("dense-llama", "f32"), lanes=0) as session:
        dense = harness.run(session, vectors.tokens, chunk=64)
        assert session.model.info.experts == 1
    with harness.threads(path, lanes=2) as session:
        upcycled = harness.run(session, vectors.tokens, chunk=7)
        continuation = harness.greedy(session, vectors.tokens, len(vectors.greedy))
        assert session.model.info.experts == 2 * pairs
    assert harness.distance(upcycled.logits, dense.logits) < BOUND
    np.testing.assert_array_equal(upcycled.logits.argmax(axis=-1), dense.logits.argmax(axis=-1))
    assert continuation == vectors.greedy.tolist()
    first, second = upcycled.experts[..., 0], upcycled.experts[..., 1]
    assert np.all((first % 2 == 0) & (second == first + 1)), "a token's experts are one pair, the lower index first"
    assert np.all(upcycled.weights == 0.5)
    assert len(np.unique(first)) == pairs, "every pair is used by some token"
