"""A strict reader of GGUF files: metadata, tensor table, tensor bytes. Values are dequantised by the gguf library.

The library's own reader builds an array per token of the vocabulary (seconds), and runs on past the end of a truncated file."""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray

from ops.container_layout import Json
from ops.convert.errors import ConvertError

F32: TypeAlias = NDArray[np.float32]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` rows first; `offset` and `row_bytes` (of one step along the first axis) in bytes."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int


class GGUFFile:
    """One open .gguf file. `metadata` has scalars and strings as they are, arrays as lists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb", buffering=1 << 20)
        except OSError as error:
            raise ConvertError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self.metadata: dict[str, Json] = {}
            self.tensors: dict[str, StoredTensor] = {}
            self._read_head()
        except OSError as error:
            self.close()
            raise ConvertError(f"{path}: cannot be read: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def rows(self, name: str, start: int, stop: int) -> F32:
        """Rows start..stop-1 along the first axis, dequantised."""
        stored = self.tensors[name]
        length = (stop - start) * stored.row_bytes
        data = np.frombuffer(self._pread(stored.offset + start * stored.row_bytes, length, name), np.uint8)
        shape = (stop - start, *stored.shape[1:])
        try:
            values = gguf.dequantize(data.reshape(math.prod(shape[:-1]) if len(shape) > 1 else 1, -1), stored.kind)
        except NotImplementedError:
            raise ConvertError(f"{self.path}: tensor {name} is of type {stored.kind.name}, which cannot be dequantised") from None
        return np.ascontiguousarray(values, dtype=np.float32).reshape(shape)

    def _read_head(self) -> None:
        if self._take(4, "the magic") != _MAGIC:
            raise ConvertError(f"{self.path}: is no GGUF file (no magic at offset 0)")
        version = self._integer("<I", "the version")
        if version not in _VERSIONS:
            raise ConvertError(f"{self.path}: is GGUF version {version}; versions {', '.join(map(str, _VERSIONS))} can be read")
        tensors, keys = self._integer("<Q", "the tensor count"), self._integer("<Q", "the key count")
        for _ in range(keys):
            key = self._string("a key")
            if key in self.metadata:
                raise ConvertError(f"{self.path}: the key {key} is there twice")
            self.metadata[key] = self._value(self._integer("<I", key), key)
        table = [self._tensor_row() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConvertError(f"{self.path}: general.alignment is {alignment!r}")
        base = -(-self._file.tell() // alignment) * alignment
        for name, dims, kind, offset in table:
            self._add(name, dims, kind, base + offset)

    def _tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        count = self._integer("<I", name)
        if not 1 <= count <= _MAX_DIMS:
            raise ConvertError(f"{self.path}: tensor {name} has {count} dimensions, wanted 1..{_MAX_DIMS}")
        dims = struct.unpack(f"<{count}Q", self._take(8 * count, f"tensor {name}"))
        return name, dims, self._integer("<I", name), self._integer("<Q", name)

    def _add(self, name: str, dims: tuple[int, ...], kind: int, offset: int) -> None:
        """`dims` as GGUF has them: columns first."""
        if name in self.tensors:
            raise ConvertError(f"{self.path}: tensor {name} is there twice")
        try:
            quant = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ConvertError(f"{self.path}: tensor {name} is of type {kind}, which the gguf library does not know") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
        if dims[0] % block:
            raise ConvertError(f"{self.path}: tensor {name} has rows of {dims[0]}, which {quant.name} cannot hold (blocks of {block})")
        size = math.prod(dims) // block * block_bytes
        if not all(dims) or offset + size > self._size:
            raise ConvertError(
                f"{self.path}: tensor {name} of shape {list(reversed(dims))} at offset {offset} ends at {offset + size}, "
                f"the file at {self._size}: truncated; fetch it again"
            )
        self.tensors[name] = StoredTensor(name, quant, tuple(reversed(dims)), offset, size // dims[-1])

    def _value(self, kind: int, key: str) -> Json:
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            return self._scalars(kind, 1, key)[0]
        inner, count = self._integer("<I", key), self._integer("<Q", key)
        if inner != _STRING:
            return self._scalars(inner, count, key)
        if count > self._size // 8:
            raise ConvertError(f"{self.path}: {key} says it has {count} strings, the file has {self._size} bytes")
        return [self._string(key) for _ in range(count)]

    def _scalars(self, kind: int, count: int, key: str) -> list[Json]:
        if kind not in _SCALARS:
            raise ConvertError(f"{self.path}: {key} at offset {self._file.tell()} has a value of type {kind}, which cannot be read")
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self._take(dtype.itemsize * count, key), dtype)
        if dtype == np.float32:  # the shortest decimal that gives the same f32: 1e-05 and not 9.99999974e-06
            return [float(str(value)) for value in values]
        result: list[Json] = values.tolist()
        return result

    def _string(self, what: str) -> str:
        raw = self._take(self._integer("<Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ConvertError(f"{self.path}: {what} before offset {self._file.tell()} is no UTF-8: {error}") from None

    def _integer(self, layout: str, what: str) -> int:
        return int(struct.unpack(layout, self._take(struct.calcsize(layout), what))[0])

    def _take(self, count: int, what: str) -> bytes:
        offset = self._file.tell()
        if offset + count > self._size:
            raise ConvertError(f"{self.path}: {what} at offset {offset} takes {count} bytes, the file has {self._size}: truncated")
        return self._file.read(count)

    def _pread(self, offset: int, length: int, name: str) -> bytearray:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            try:
                got = os.preadv(self._file.fileno(), [view[done : done + (1 << 30)]], offset + done)
            except OSError as error:
                raise ConvertError(f"{self.path}: tensor {name} at offset {offset + done} cannot be read: {error.strerror}") from error
            if not got:
                raise ConvertError(f"{self.path}: tensor {name} ends at offset {offset + done}, wanted {offset + length}: truncated")
            done += got
        return data
