"""Damping by itself, of scores that are given: for tests and simulations (colibri_damp_scores). Any thread; the GIL is released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_c._engine import ffi, lib
from engine_c.library import fail
from engine_c.routing import Damping

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def damp_scores(
    damping: Damping,
    scores: npt.NDArray[np.float32],
    *,
    k: int,
    steps: Sequence[int] | None = None,
    logits: bool = True,
    pinned: npt.NDArray[np.bool_] | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Experts [n, k] of tokens with selection scores [n, experts], and which tokens' experts are not the k best.

    steps: tokens of each step, all in one if None. Scope "sequence": all are one sequence's; scope "batch": each is another's, and those
    that are pinned are not damped. logits: the scores are logits, not what weights are made of. EngineError EINVAL, ENOMEM.
    """
    import numpy as np

    n, experts = scores.shape
    scores = np.ascontiguousarray(scores, np.float32)
    counts = [n] if steps is None else list(steps)
    if sum(counts) != n or (pinned is not None and pinned.shape != (n,)):
        raise ValueError(f"{n} tokens of scores do not fit steps of {sum(counts)}, or pinned has another shape")
    ids, changed = np.zeros((n, max(k, 1)), np.int32), np.zeros(n, np.uint8)
    held = ffi.NULL if pinned is None else ffi.from_buffer("uint8_t *", pinned.astype(np.uint8))
    err = ffi.new("colibri_error *")
    given = ffi.new("colibri_damping *", damping.as_tuple()), ffi.from_buffer("float *", scores), experts, k, int(logits)
    into = ffi.from_buffer("int32_t *", ids, require_writable=True), ffi.from_buffer("uint8_t *", changed, require_writable=True)
    if lib.colibri_damp_scores(*given, ffi.new("int32_t[]", counts), len(counts), held, *into, err):
        raise fail(err)
    return ids, changed.astype(np.bool_)
