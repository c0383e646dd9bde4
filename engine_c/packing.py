"""Weights between numpy arrays and the container's packed layouts (docs/container.md). Used offline, by converters and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine_c._engine import ffi, lib
from engine_c.basics import EngineError
from engine_c.library import fail
from engine_c.structs import FORMATS

if TYPE_CHECKING:
    from engine_c._engine import Error, Pointer

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def packed_bytes(fmt: str, n: int, k: int) -> int:
    """Bytes of a packed matrix [n, k]."""
    return _size(lib.colibri_packed_bytes(FORMATS[fmt], n, k), fmt, n, k)


def expert_bytes(fmt: str, hidden: int, ffn: int) -> int:
    """Bytes of a packed expert: gate and up [ffn, hidden], down [hidden, ffn]."""
    return _size(lib.colibri_expert_bytes(FORMATS[fmt], hidden, ffn), fmt, hidden, ffn)


def pack(fmt: str, w: npt.ArrayLike) -> Bytes:
    """Packs a matrix [n, k]. EngineError ENUMERIC if a weight is not finite."""
    matrix = _matrix(w)
    n, k = matrix.shape
    out = np.empty(packed_bytes(fmt, n, k), np.uint8)
    err = ffi.new("colibri_error *")
    _check(lib.colibri_pack(FORMATS[fmt], _floats(matrix), n, k, _bytes(out), err), err)
    return out


def pack_expert(fmt: str, gate: npt.ArrayLike, up: npt.ArrayLike, down: npt.ArrayLike) -> Bytes:
    """Packs one expert: gate and up [ffn, hidden], down [hidden, ffn]."""
    g, u, d = _matrix(gate), _matrix(up), _matrix(down)
    ffn, hidden = g.shape
    if u.shape != (ffn, hidden) or d.shape != (hidden, ffn):
        raise ValueError(f"gate {g.shape}, up {u.shape} and down {d.shape} do not belong to one expert")
    out = np.empty(expert_bytes(fmt, hidden, ffn), np.uint8)
    err = ffi.new("colibri_error *")
    _check(lib.colibri_pack_expert(FORMATS[fmt], _floats(g), _floats(u), _floats(d), hidden, ffn, _bytes(out), err), err)
    return out


def unpack(fmt: str, packed: Bytes | bytes | memoryview, n: int, k: int) -> Floats:
    """The inverse of pack, dequantised: [n, k]."""
    source = _source(packed, packed_bytes(fmt, n, k))
    out = np.empty((n, k), np.float32)
    err = ffi.new("colibri_error *")
    _check(lib.colibri_unpack(FORMATS[fmt], source, n, k, _floats(out), err), err)
    return out


def unpack_expert(fmt: str, packed: Bytes | bytes | memoryview, hidden: int, ffn: int) -> tuple[Floats, Floats, Floats]:
    """The inverse of pack_expert, dequantised: gate, up [ffn, hidden] and down [hidden, ffn]."""
    source = _source(packed, expert_bytes(fmt, hidden, ffn))
    gate, up, down = np.empty((ffn, hidden), np.float32), np.empty((ffn, hidden), np.float32), np.empty((hidden, ffn), np.float32)
    err = ffi.new("colibri_error *")
    _check(lib.colibri_unpack_expert(FORMATS[fmt], source, hidden, ffn, _floats(gate), _floats(up), _floats(down), err), err)
    return gate, up, down


def _size(count: int, fmt: str, rows: int, columns: int) -> int:
    if not count:
        raise EngineError(lib.COLIBRI_EINVAL, f"no {fmt} layout for shape [{rows}, {columns}]")
    return count


def _matrix(w: npt.ArrayLike) -> Floats:
    matrix = np.ascontiguousarray(w, np.float32)
    if matrix.ndim != 2:
        raise ValueError(f"a matrix is needed, not an array of shape {matrix.shape}")
    return matrix


def _floats(array: Floats) -> Pointer:
    return ffi.from_buffer("float *", array)


def _bytes(array: Bytes) -> Pointer:
    return ffi.from_buffer("uint8_t *", array, require_writable=True)


def _source(packed: Bytes | bytes | memoryview, count: int) -> Pointer:
    size = len(packed) if isinstance(packed, bytes) else packed.nbytes
    if size != count:
        raise ValueError(f"packed data has {size} bytes, its shape needs {count}")
    return ffi.from_buffer("uint8_t *", packed)


def _check(status: int, err: Error) -> None:
    if status:
        raise fail(err)
