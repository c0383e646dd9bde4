"""What a step of the training sees and how fast it learns: functions of the step alone, so that a run that was stopped goes on as if it
had not been. Needs no torch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.tiny.splits import KINDS

BOS_ID = 0
STEP_TOKENS = 2048
PEAK_RATE, LAST_RATE, WARMUP_STEPS = 1.5e-3, 0.02, 100  # LAST_RATE: share of the peak at the end of the cosine
SHORT, LONG, LONG_FROM = 512, 1024, 0.8  # context, and the share of the steps after which it is the longer one

Tokens = dict[str, NDArray[np.uint16]]
"""Token ids of each kind."""


def load_tokens(data: Path, split: str) -> Tokens:
    """As `ops.tiny.data` wrote them."""
    return {kind: np.load(data / f"{split}-{kind}.npy") for kind in KINDS}


def batch(tokens: Tokens, *, step: int, seed: int, context: int) -> tuple[NDArray[np.int64], list[str]]:
    """Windows [rows, context + 1] and their kinds, which take turns, so that all get equally much. About every second window starts with
    `<s>` in place of its first token, as prompts do."""
    random = np.random.default_rng((seed, step))
    rows, kinds = [], []
    for row in range(STEP_TOKENS // context):
        serial = step * (STEP_TOKENS // context) + row
        kind = KINDS[serial % len(KINDS)]
        start = int(random.integers(len(tokens[kind]) - context - 1))
        window = tokens[kind][start : start + context + 1].astype(np.int64)
        if random.random() < 0.5:
            window[0] = BOS_ID
        rows.append(window)
        kinds.append(kind)
    return np.stack(rows), kinds


def context_at(step: int, *, end: int) -> int:
    """Tokens of a window: most of the training on short ones, which is cheaper, the end on those the model is to be used with."""
    return LONG if step >= LONG_FROM * end else SHORT


def rate(step: int, *, steps: int, finish: tuple[int, int] | None) -> float:
    """Learning rate of a step: warm-up, then a cosine; `finish` (from, to) brings it to zero linearly instead."""
    if finish is not None and step >= finish[0]:
        begin, end = finish
        return rate(begin, steps=steps, finish=None) * max(0.0, 1 - (step - begin) / max(1, end - begin))
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    done = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return PEAK_RATE * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))
