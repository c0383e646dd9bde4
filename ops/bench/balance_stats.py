"""Statistics of a judgement: queues of experts, and what a policy costs in perplexity. Queue: the tokens an expert gets in one step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Over all steps. A variance is that over the steps (and experts) of one layer, averaged over layers: that layers differ is no
    fluctuation."""

    mean: float  # tokens an expert gets in a step
    variance: float  # of that, about the mean of all experts
    longest: float  # mean of the longest queue of a layer and step
    longest_variance: float
    longest_most: int
    active: float  # experts of a layer that get a token in a step


@dataclass(frozen=True, slots=True)
class Change:
    """How much larger a perplexity is than another of the same tokens, as a share; `error` is the standard error of that."""

    share: float
    error: float


def queues(experts: NDArray[np.integer], *, count: int) -> NDArray[np.int32]:
    """[steps, layers, count] queue lengths of routes [steps, layers, rows, k]."""
    steps, layers = experts.shape[:2]
    cells = np.arange(steps * layers).reshape(steps, layers, 1, 1) * count + experts
    return np.bincount(cells.ravel(), minlength=steps * layers * count).reshape(steps, layers, count).astype(np.int32)


def queue_stats(lengths: NDArray[np.int32]) -> QueueStats:
    """Of queue lengths [steps, layers, experts]."""
    longest = lengths.max(axis=2)
    mean = lengths.mean(axis=(0, 2), keepdims=True)
    return QueueStats(
        mean=float(lengths.mean()),
        variance=float(((lengths - mean) ** 2).mean()),
        longest=float(longest.mean()),
        longest_variance=float(longest.var(axis=0).mean()),
        longest_most=int(longest.max()),
        active=float((lengths > 0).sum(axis=2).mean()),
    )


def perplexity(logprobs: Floats) -> float:
    """Of natural log-probabilities."""
    return math.exp(-float(logprobs.mean()))


def change(logprobs: Floats, than: Floats, groups: NDArray[np.integer]) -> Change:
    """Of the perplexity of the same tokens, compared token by token. Tokens of a group (an excerpt) may depend on one another, groups do
    not: the error is that of a ratio of sums over groups."""
    apart = (than - logprobs).ravel()
    mean = float(apart.mean())
    _, index = np.unique(groups.ravel(), return_inverse=True)
    sums = np.bincount(index, weights=apart - mean)
    count = len(sums)
    error = math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(apart) if count > 1 else math.nan
    return Change(math.expm1(mean), math.exp(mean) * error)


def relative(value: float, than: float) -> float:
    """value / than - 1; 0 where both are 0."""
    return value / than - 1 if than else 0.0
