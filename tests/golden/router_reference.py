"""Routers in float64 numpy, written from the families' formulas and not from the engine: what is compared, who is chosen, how weighed.

A router is a container's `router` object (docs/container.md); a key that is not there has its plainest value. Logits are [rows, experts].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int32]
Facts = Mapping[str, Any]


def scores(router: Facts, z: Array) -> Array:
    """What the gate says of each expert by itself."""
    kind = router.get("score", "softmax_all")
    with np.errstate(over="ignore"):
        if kind == "softmax_all":
            e = np.exp(z - z.max(axis=-1, keepdims=True))
            return np.asarray(e / e.sum(axis=-1, keepdims=True))
        if kind == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-z)))
        if kind == "sqrt_softplus":
            return np.asarray(np.sqrt(np.logaddexp(0, z)))
    return z


def has_groups(router: Facts) -> bool:
    return (router.get("n_group") or 1) > 1


def choice(router: Facts, z: Array, select_bias: Array | None) -> tuple[Array, Array]:
    """What selection compares [rows, experts], and the gap between the worst group kept and the best left out [rows] (or inf)."""
    out = scores(router, z) + (0 if select_bias is None else select_bias)
    if not has_groups(router):
        return out, np.full(len(z), np.inf)
    groups, keep = router["n_group"], router["topk_group"]
    inner = out.reshape(len(z), groups, -1)
    ordered = -np.sort(-inner, axis=-1)
    metric = ordered[..., 0] if router["group_metric"] == "max" else ordered[..., :2].sum(axis=-1)
    best = np.argsort(-metric, axis=-1, kind="stable")
    ranked = np.take_along_axis(metric, best, axis=-1)
    gap = ranked[:, keep - 1] - ranked[:, keep] if keep < groups else np.full(len(z), np.inf)
    kept = np.zeros((len(z), groups), bool)
    np.put_along_axis(kept, best[:, :keep], True, axis=-1)
    left_out = 0.0 if router["group_mask"] == "zero" else -np.inf
    return np.where(kept[..., None], inner, left_out).reshape(out.shape), gap


def order(compared: Array) -> Ids:
    """All experts by descending value, ties to the lower index."""
    return np.argsort(-compared, axis=-1, kind="stable").astype(np.int32)


def weights(router: Facts, z: Array, ids: Ids, expert_scale: Array | None) -> Array:
    """Of chosen experts, ids [rows, k]."""
    w = renormalised(router, unscaled(router, z, ids)) * router.get("scale", 1.0)
    return np.asarray(w if expert_scale is None else w * expert_scale[ids])


def unscaled(router: Facts, z: Array, ids: Ids) -> Array:
    """Weights before they are renormalised."""
    kind, chosen = router.get("weight", "softmax_chosen"), np.take_along_axis(z, ids, axis=-1)
    if kind == "softmax_chosen":
        return scores({"score": "softmax_all"}, chosen)
    if kind == "sigmoid_chosen":
        return scores({"score": "sigmoid"}, chosen)
    if kind == "sparsemixer":
        return sparsemixer(z, ids, router["jitter_eps"])[0]
    return np.take_along_axis(scores(router, z), ids, axis=-1)


def renormalised(router: Facts, w: Array) -> Array:
    """Divided by their sum, where the router says so."""
    if router.get("renorm", "none") != "sum":
        return w
    total, eps = w.sum(axis=-1, keepdims=True), router.get("renorm_eps", 0.0)
    return np.asarray(w / (total + eps if router.get("renorm_way", "add") == "add" else np.maximum(total, eps)))


def sparsemixer(z: Array, ids: Ids, eps: float) -> tuple[Array, Array]:
    """PhiMoE's weights [rows, k], continued for more than two experts; and how near a logit came to the threshold [rows]."""
    left, rows = z.copy(), np.arange(len(z))
    out, nearest = np.empty(ids.shape), np.full(len(z), np.inf)
    for i in range(ids.shape[1]):
        most = z[rows, ids[:, i]][:, None]
        size = np.maximum(np.abs(z), most)
        distance = (most - z) / np.where(size == 0, 1, size)
        kept = np.where(distance > 2 * eps, -np.inf, left)
        out[:, i] = scores({}, kept)[rows, ids[:, i]]
        nearest = np.minimum(nearest, np.abs(distance - 2 * eps).min(axis=-1))
        left[rows, ids[:, i]] = -np.inf
    return out, nearest
