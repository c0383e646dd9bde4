"""What a traced run over a text says about a model: how well it predicts, and whether its experts have specialised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Trace:
    """N scored tokens of one kind of text, in windows one after the other; L layers, E experts, k of them a token."""

    logprobs: NDArray[np.float64]  # [N] of the text's own next token
    experts: NDArray[np.int32]  # [L, N, k] best first
    gates: NDArray[np.float32] | None  # [L, N, E] gate logits; the engine does not hand them out
    window: int  # tokens a window


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one kind, or of all mixed. Lists have one figure a layer."""

    tokens: int
    perplexity: float
    load: list[float]  # most tokens an expert got, over the mean of all
    repeats: list[float]  # share of tokens whose first expert is that of the token before
    gap: list[float] | None  # median of second less third gate logit


def joined(traces: Sequence[Trace]) -> Trace:
    """All kinds, equally much of each."""
    least = min(len(trace.logprobs) for trace in traces)
    gates = [trace.gates[:, :least] for trace in traces if trace.gates is not None]
    return Trace(
        logprobs=np.concatenate([trace.logprobs[:least] for trace in traces]),
        experts=np.concatenate([trace.experts[:, :least] for trace in traces], axis=1),
        gates=np.concatenate(gates, axis=1) if len(gates) == len(traces) else None,
        window=traces[0].window,
    )


def figures(trace: Trace, *, experts: int) -> Figures:
    """Of one trace."""
    gap = None
    if trace.gates is not None:
        ordered = np.sort(trace.gates, axis=-1)
        k = trace.experts.shape[-1]
        gap = np.median(ordered[..., -k] - ordered[..., -k - 1], axis=1).tolist()
    return Figures(
        tokens=len(trace.logprobs),
        perplexity=math.exp(-float(trace.logprobs.mean())),
        load=[load_ratio(layer, experts) for layer in trace.experts],
        repeats=[repeats(layer, trace.window) for layer in trace.experts],
        gap=gap,
    )


def load_ratio(chosen: NDArray[np.int32], experts: int) -> float:
    """1 if all experts get the same number of tokens, experts / k if the same k get all."""
    counts = np.bincount(chosen.ravel(), minlength=experts)
    return float(counts.max() / counts.mean())


def repeats(chosen: NDArray[np.int32], window: int) -> float:
    """Share of tokens whose first expert is that of the token before; a window's first token has none before it."""
    first = chosen[:, 0]
    same = first[1:] == first[:-1]
    inside = np.arange(1, len(first)) % window != 0
    return float(same[inside].mean())


def all_figures(traces: Mapping[str, Trace], *, experts: int) -> dict[str, Figures]:
    """Of every kind and of their mixture."""
    found = {kind: figures(trace, experts=experts) for kind, trace in traces.items()}
    return found | {MIXED: figures(joined(list(traces.values())), experts=experts)}


def table(found: Mapping[str, Figures]) -> Iterator[str]:
    """Markdown."""
    yield "| text | tokens | perplexity | load max/mean, layers | same first expert as before, % | median gap of 2nd to 3rd gate logit |"
    yield "|---|---|---|---|---|---|"
    for kind, of in found.items():
        load = ", ".join(f"{value:.2f}" for value in of.load)
        same = ", ".join(f"{100 * value:.0f}" for value in of.repeats)
        gap = ", ".join(f"{value:.2f}" for value in of.gap) if of.gap else ""
        yield f"| {kind} | {of.tokens} | {of.perplexity:.3f} | {load} | {same} | {gap} |"
