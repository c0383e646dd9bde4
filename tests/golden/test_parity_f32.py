"""f32 containers equal transformers, and their bits do not depend on workers, prefill chunks or where KV blocks lie."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden import harness
from tests.golden.harness import Containers

CHUNKS = (1, 5, 16, 64)
WORKERS = (0, 1, 2, 3)


@pytest.mark.parametrize("name", harness.NAMES)
def test_f32_equals_transformers(name: str, container: Containers) -> None:
    vectors = harness.vectors(name)
    with harness.team(container(name, "f32"), workers=0) as session:
        trace = harness.run(session, vectors.tokens, chunk=16)
        continuation = harness.greedy(session, vectors.tokens, len(vectors.greedy))
    assert harness.distance(trace.logits, vectors.logits) < harness.F32_BOUND
    np.testing.assert_array_equal(trace.experts, vectors.experts)
    np.testing.assert_allclose(trace.weights, vectors.weights, rtol=0, atol=harness.WEIGHT_BOUND)
    assert continuation == vectors.greedy.tolist()


@pytest.mark.parametrize("name", harness.NAMES)
def test_f32_bits_do_not_depend_on_workers_chunks_or_blocks(name: str, container: Containers) -> None:
    path, tokens = container(name, "f32"), harness.vectors(name).tokens
    with harness.team(path, workers=0) as session:
        expected = harness.run(session, tokens, chunk=64).bits()
    for workers in WORKERS:
        with harness.team(path, workers=workers) as session:
            for chunk in CHUNKS:
                for seed in (None, chunk):
                    got = harness.run(session, tokens, chunk=chunk, seed=seed).bits()
                    assert got == expected, f"{workers} workers, chunks of {chunk}, blocks by seed {seed}"


@pytest.mark.parametrize("workers", WORKERS)
def test_greedy_tokens_do_not_depend_on_workers(workers: int, container: Containers) -> None:
    vectors = harness.vectors("window")
    with harness.team(container("window", "f32"), workers=workers) as session:
        assert harness.greedy(session, vectors.tokens, len(vectors.greedy)) == vectors.greedy.tolist()
