"""A strict reader of safetensors files: 8 bytes of header length, a JSON header, tensor bytes without holes or overlaps.

Tensors are read with pread rather than from a mapping, so that a file which shrinks while it is read gives an error and not SIGBUS, and
so that the memory of a conversion is what its largest tensor takes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ops.convert.errors import ConvertError

F32: TypeAlias = NDArray[np.float32]

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_WIDTH = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_READABLE = ("F32", "F16", "BF16")
_MAX_DIM = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `offset` from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


class SafetensorsFile:
    """One open .safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConvertError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def rows(self, name: str, start: int, stop: int) -> F32:
        """Rows start..stop-1 along the first axis, as f32."""
        stored = self.tensors[name]
        if stored.dtype not in _READABLE:
            raise ConvertError(f"{self.path}: tensor {name} is of type {stored.dtype}; weights can be read from {', '.join(_READABLE)}")
        if not 0 <= start <= stop <= (stored.shape[0] if stored.shape else 0):
            raise ConvertError(f"{self.path}: tensor {name} of shape {list(stored.shape)} has no rows {start}..{stop}")
        row_bytes = stored.length // stored.shape[0]
        data = self._read(stored.offset + start * row_bytes, (stop - start) * row_bytes, f"tensor {name}")
        return _to_f32(data, stored.dtype).reshape((stop - start, *stored.shape[1:]))

    def _read_header(self) -> dict[str, StoredTensor]:
        size = os.fstat(self._fd).st_size
        if size < 8:
            raise ConvertError(f"{self.path}: is {size} bytes long, too short for a safetensors file; fetch it again")
        length = int.from_bytes(self._read(0, 8, "header").tobytes(), "little")
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise ConvertError(f"{self.path}: says its header takes {length} bytes, the file has {size}; truncated or no safetensors file")
        try:
            header = json.loads(self._read(8, length, "header").tobytes(), object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConvertError):
                raise
            raise ConvertError(f"{self.path}: the header at offset 8 is no JSON: {error}") from None
        if not isinstance(header, dict):
            raise ConvertError(f"{self.path}: the header at offset 8 is no JSON object")
        header.pop("__metadata__", None)
        tensors = {name: self._entry(name, entry, 8 + length, size) for name, entry in header.items()}
        self._check_cover(tensors, 8 + length, size)
        return tensors

    def _unique(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConvertError(f"{self.path}: {twice} is in the header twice")
        return result

    def _entry(self, name: str, entry: object, base: int, size: int) -> StoredTensor:
        where = f"{self.path}: tensor {name}"
        if not isinstance(entry, dict):
            raise ConvertError(f"{where}: its header entry is no JSON object")
        dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _WIDTH:
            raise ConvertError(f"{where} is of type {dtype!r}, which is none of the format's")
        if not isinstance(shape, list) or not all(_is_count(dim) for dim in shape):
            raise ConvertError(f"{where} has the shape {shape!r}, which is no list of sizes")
        if not isinstance(span, list) or len(span) != 2 or not all(_is_count(value) for value in span):
            raise ConvertError(f"{where} has the data_offsets {span!r}, which are no two offsets")
        begin, end = span
        if begin > end or base + end > size:
            raise ConvertError(f"{where} at offset {base + begin} ends at {base + end}, the file at {size}: truncated; fetch it again")
        expected = _WIDTH[dtype]
        for dim in shape:
            expected *= dim
        if expected != end - begin:
            raise ConvertError(f"{where} at offset {base + begin} has {end - begin} bytes, {dtype} of shape {shape} needs {expected}")
        return StoredTensor(name, dtype, tuple(shape), base + begin, end - begin)

    def _check_cover(self, tensors: dict[str, StoredTensor], base: int, size: int) -> None:
        position = base
        for stored in sorted(tensors.values(), key=lambda stored: (stored.offset, stored.length)):
            if stored.offset != position:
                kind = "overlaps the tensor before it" if stored.offset < position else "leaves a hole before it"
                raise ConvertError(f"{self.path}: tensor {stored.name} at offset {stored.offset} {kind} (expected at {position})")
            position += stored.length
        if position != size:
            raise ConvertError(f"{self.path}: the tensors end at offset {position}, the file at {size}; damaged, fetch it again")

    def _read(self, offset: int, length: int, what: str) -> NDArray[np.uint8]:
        data = np.empty(length, np.uint8)
        view = data.data
        done = 0
        while done < length:
            try:
                got = os.preadv(self._fd, [view[done : done + (1 << 30)]], offset + done)
            except OSError as error:
                raise ConvertError(f"{self.path}: {what} at offset {offset + done} cannot be read: {error.strerror}") from error
            if not got:
                raise ConvertError(f"{self.path}: {what} ends at offset {offset + done}, wanted up to {offset + length}: truncated")
            done += got
        return data


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_DIM


def _to_f32(data: NDArray[np.uint8], dtype: str) -> F32:
    if dtype == "F32":
        return data.view("<f4").astype(np.float32, copy=False)
    if dtype == "F16":
        return data.view("<f2").astype(np.float32)
    wide = data.view("<u2").astype(np.uint32)
    np.left_shift(wide, 16, out=wide)  # bf16 is the upper half of an f32
    return wide.view(np.float32)
