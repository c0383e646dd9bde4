"""The router by itself: gate logits to experts and weights (colibri_route_logits). Field names and values are docs/container.md's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, NamedTuple

from engine_c._engine import ffi, lib
from engine_c.library import fail

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# In the order of colibri.h's enums.
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "score": ("softmax_all", "sigmoid", "sqrt_softplus", "logits"),
    "weight": ("softmax_chosen", "unbiased_score", "sparsemixer", "sigmoid_chosen"),
    "group_metric": ("max", "sum_top2"),
    "group_mask": ("zero", "minus_inf"),
    "renorm": ("none", "sum"),
    "renorm_way": ("add", "clamp"),
    "apply_at": ("output", "input"),
    "input": ("normed", "residual"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router's descriptor (colibri_router_desc). What contradicts itself is found when it is used."""

    experts: int
    k: int
    score: Literal["softmax_all", "sigmoid", "sqrt_softplus", "logits"] = "softmax_all"
    weight: Literal["softmax_chosen", "unbiased_score", "sparsemixer", "sigmoid_chosen"] = "softmax_chosen"
    n_group: int = 1
    topk_group: int = 1
    group_metric: Literal["max", "sum_top2"] = "max"
    group_mask: Literal["zero", "minus_inf"] = "zero"
    renorm: Literal["none", "sum"] = "none"
    renorm_way: Literal["add", "clamp"] = "add"
    apply_at: Literal["output", "input"] = "output"
    input: Literal["normed", "residual"] = "normed"
    renorm_eps: float = 0.0
    scale: float = 1.0
    jitter_eps: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"router.{name} is {getattr(self, name)!r}; the engine runs: {', '.join(choices)}")

    @classmethod
    def from_json(cls, router: Mapping[str, object], *, experts: int) -> Router:
        """From a container's descriptor, whose `router` this is. ValueError for a key there is none of, or a value that is none."""
        known = {field.name for field in fields(cls)} - {"experts"}
        said = {key: value for key, value in router.items() if value is not None and (key in known or value is not False)}
        if unknown := sorted(said.keys() - known):
            raise ValueError(f"router.{unknown[0]} is set, which this engine does not know; it knows {', '.join(sorted(known))}")
        return cls(experts=experts, **said)  # type: ignore[arg-type]  # values are checked above and by the engine

    def as_tuple(self) -> tuple[int | float, ...]:
        """In the order of the C struct."""
        return tuple(
            _CHOICES[field.name].index(getattr(self, field.name)) if field.name in _CHOICES else getattr(self, field.name)
            for field in fields(self)
        )


class Routed(NamedTuple):
    """Experts and weights [rows, k] by descending selection score, and which rows are bad [rows] (bool): NaN, infinite or overflowing."""

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    bad: npt.NDArray[np.bool_]


def route_logits(
    router: Router, logits: npt.ArrayLike, *, select_bias: npt.ArrayLike | None = None, expert_scale: npt.ArrayLike | None = None
) -> Routed:
    """Routes rows of gate logits [rows, experts] (biases of the logits added). A bad row gets experts 0..k-1 of weight 0. EngineError
    EINVAL names the descriptor's field that makes no sense."""
    import numpy as np

    z = np.ascontiguousarray(logits, np.float32)
    if z.ndim != 2 or z.shape[1] != router.experts:
        raise ValueError(f"logits have shape {z.shape}, wanted [rows, {router.experts}]")
    vectors = [_vector(name, router, values) for name, values in (("select_bias", select_bias), ("expert_scale", expert_scale))]
    rows, err = len(z), ffi.new("colibri_error *")
    ids, weights = np.empty((rows, router.k), np.int32), np.empty((rows, router.k), np.float32)
    bad = np.empty(rows, np.bool_)
    into = ffi.from_buffer("int32_t *", ids, True), ffi.from_buffer("float *", weights, True), ffi.from_buffer("uint8_t *", bad, True)
    bias, scale = (ffi.NULL if vector is None else ffi.from_buffer("float *", vector) for vector in vectors)
    desc = ffi.new("colibri_router_desc *", router.as_tuple())
    if lib.colibri_route_logits(desc, bias, scale, ffi.from_buffer("float *", z), router.experts, rows, *into, err):
        raise fail(err)
    return Routed(ids, weights, bad)


def _vector(name: str, router: Router, values: npt.ArrayLike | None) -> npt.NDArray[np.float32] | None:
    import numpy as np

    if values is None:
        return None
    vector = np.ascontiguousarray(values, np.float32)
    if vector.shape != (router.experts,):
        raise ValueError(f"{name} has shape {vector.shape}, wanted [{router.experts}]")
    return vector
