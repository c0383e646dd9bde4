"""Log-probabilities of given tokens, which Score and the perplexity tool rest on, equal the reference's."""

from __future__ import annotations

import numpy as np
import pytest

from ops.bench import perplexity
from tests.golden import harness, reference
from tests.golden.harness import Containers


def log_softmax(logits: reference.Array) -> reference.Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: reference.Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


@pytest.mark.parametrize("first", [None, 3])
@pytest.mark.parametrize("window", [7, 16, 64, 1000])
@pytest.mark.parametrize("name", ["window", "dense-llama"])
def test_scores_equal_the_reference(name: str, window: int, first: int | None, container: Containers) -> None:
    """Every token but the first of all is scored once, from those before it in its window, whose first may be a given one."""
    tokens = [int(t) for t in harness.vectors(name).tokens]
    model = reference.from_checkpoint(harness.MODELS / name)
    expected, best = [], []
    for start in range(0, len(tokens) - 1, window):
        part = tokens[start : start + window + 1]
        part[0] = part[0] if first is None else first
        logprobs = log_softmax(reference.forward(model, part[:-1]).logits)
        expected += logprobs[np.arange(len(part) - 1), part[1:]].tolist()
        best += logprobs.argmax(axis=-1).tolist()
    result = perplexity.score(container(name, "f32"), tokens, window=window, first=first)
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    assert result.best.tolist() == best
    assert result.hits == np.mean([guess == token for guess, token in zip(best, tokens[1:], strict=True)])
    assert result.perplexity == pytest.approx(np.exp(-np.mean(expected)), rel=1e-4)


def test_a_text_that_predicts_nothing_is_refused(container: Containers) -> None:
    with pytest.raises(perplexity.PerplexityError, match="two are the least"):
        perplexity.score(container("window", "f32"), [5])
