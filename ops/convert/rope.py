"""Rotary frequencies. The engine knows inverse frequencies and one factor; the scaling schemes below are turned into those.

Formulas: transformers' modeling_rope_utils (linear, llama3, yarn); YaRN is arXiv:2309.00071."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ops.container_layout import Json
from ops.convert.errors import ConvertError
from ops.convert.families import Table, setting
from ops.convert.source import Source

F32: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rotary:
    inv_freq: F32
    """[dims / 2]"""
    scale: float
    """multiplies rotated queries and keys"""


def rotary(table: Table, source: Source, head_dim: int, max_context: int) -> Rotary:
    theta = _first(table, source, "theta")
    if theta is None:
        raise ConvertError(f"{source.path}: the setting {' or '.join(_keys(table, 'theta'))} is missing (rotary positions depend on it)")
    where = str(source.path)
    dims = _dims(table, source, head_dim)
    base = _positive(where, "rope_theta", theta)
    scaling = _first(table, source, "scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ConvertError(f"{where}: rope scaling is {scaling!r}; positions that differ by layer are not supported")
    result = scaled(where, scaling, base, dims, max_context)
    factors = str(table.rope.get("factors", ""))
    if factors in source.shapes:
        if source.shapes[factors] != (dims // 2,):
            raise ConvertError(f"{source.where(factors)}: tensor {factors} has shape {list(source.shapes[factors])}, wanted [{dims // 2}]")
        result = Rotary(result.inv_freq / source.rows(factors, 0, dims // 2), result.scale)
    return result


def scaled(where: str, scaling: Mapping[str, Json], base: float, dims: int, max_context: int) -> Rotary:
    """Inverse frequencies for a rope_scaling or rope_parameters object ({} for none)."""
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _SCHEMES:
        raise ConvertError(f"{where}: rope scaling of type {kind!r} is not supported (supported: {', '.join(_SCHEMES)})")
    exponent = np.arange(0, dims, 2, dtype=np.float64) / dims
    plain = (np.float32(1.0) / (base**exponent).astype(np.float32)).astype(np.float32)  # rounded where torch rounds
    return _SCHEMES[kind](_Scaling(where, scaling, base, dims, max_context), plain)


@dataclass(frozen=True, slots=True)
class _Scaling:
    where: str
    values: Mapping[str, Json]
    base: float
    dims: int
    max_context: int

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        return _positive(self.where, f"rope scaling's {key}", value)


def _default(_scaling: _Scaling, plain: F32) -> Rotary:
    return Rotary(plain, 1.0)


def _linear(scaling: _Scaling, plain: F32) -> Rotary:
    return Rotary(plain / np.float32(scaling.number("factor")), 1.0)


def _llama3(scaling: _Scaling, plain: F32) -> Rotary:
    factor, low, high = scaling.number("factor"), scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    context = scaling.number("original_max_position_embeddings")
    turns = context * plain.astype(np.float64) / (2 * math.pi)  # rotations within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: slow, divided; 1: fast, kept
    return Rotary((plain * ((1 - smooth) / factor + smooth)).astype(np.float32), 1.0)


def _yarn(scaling: _Scaling, plain: F32) -> Rotary:
    factor = scaling.number("factor")
    context = scaling.number("original_max_position_embeddings", float(scaling.max_context))
    low, high = (_turn_dim(scaling, turns, context) for turns in (scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)))
    if scaling.values.get("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, scaling.dims - 1.0)
    ramp = np.clip((np.arange(scaling.dims // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return Rotary((plain * (ramp / factor + (1 - ramp))).astype(np.float32), _yarn_attention(scaling, factor))


def _turn_dim(scaling: _Scaling, turns: float, context: float) -> float:
    """The dimension that makes `turns` rotations within the original context."""
    return scaling.dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(scaling.base))


def _yarn_attention(scaling: _Scaling, factor: float) -> float:
    if scaling.values.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        return _mscale(factor, scaling.number("mscale")) / _mscale(factor, scaling.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


_SCHEMES: Mapping[str, Callable[[_Scaling, F32], Rotary]] = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def _dims(table: Table, source: Source, head_dim: int) -> int:
    value = _first(table, source, "dims")
    dims = head_dim if value is None else int(_positive(str(source.path), "the number of rotary dimensions", value))
    if dims % 2 or dims > head_dim:
        raise ConvertError(f"{source.path}: {dims} rotary dimensions of {head_dim}: must be even and fit the head")
    return dims


def _first(table: Table, source: Source, what: str) -> Json:
    found = (setting(source.config, key) for key in _keys(table, what))
    return next((value for value in found if value is not None), None)


def _keys(table: Table, what: str) -> list[str]:
    keys = table.rope.get(what, [])
    return [str(key) for key in keys] if isinstance(keys, list) else [str(keys)]


def _positive(where: str, key: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConvertError(f"{where}: {key} is {value!r}, wanted a positive number")
    return float(value)
