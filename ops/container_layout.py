"""The `.colibri` byte layout (docs/container.md): header, table entries and their checks. No files are touched here."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from engine_c import EngineError
from engine_c.packing import expert_bytes, packed_bytes

MAGIC = b"COLIBRI\0"
VERSION = 1
BYTE_ORDER = 0x01020304
HEADER_BYTES = 64
MAX_DESCRIPTOR_BYTES = 64 << 20
LAYOUT_ALIGNMENT = {"plain": 64, "p32": 4096, "expert": 4096}
BLOB_ALIGNMENT = 64
FORMAT_NAMES = ("f32", "bf16", "int8", "int4")

_HEADER = struct.Struct("<8sIIQQQI")  # 44 bytes, followed by their CRC-32 and zeros
_MAX_DIM = (1 << 31) - 1

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"


class ContainerError(ValueError):
    """A container is malformed, truncated or damaged, or could not be written. The message names file, tensor and offset."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table. `offset` and `length` in bytes; `shape` as docs/container.md gives it for the role."""

    name: str
    layout: str
    format: str
    shape: tuple[int, ...]
    offset: int = 0
    length: int = 0
    sha256: str = ""

    def to_json(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "layout": self.layout,
            "format": self.format,
            "shape": list(self.shape),
            "offset": self.offset,
            "length": self.length,
            "sha256": self.sha256,
        }


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """A file embedded as it is: tokenizer, chat template, source configuration, licence."""

    offset: int
    length: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Header:
    descriptor_offset: int
    descriptor_length: int
    file_length: int
    descriptor_crc: int

    def to_bytes(self) -> bytes:
        fixed = _HEADER.pack(
            MAGIC, VERSION, BYTE_ORDER, self.descriptor_offset, self.descriptor_length, self.file_length, self.descriptor_crc
        )
        return (fixed + struct.pack("<I", zlib.crc32(fixed))).ljust(HEADER_BYTES, b"\0")


def stored_bytes(layout: str, fmt: str, shape: tuple[int, ...]) -> int:
    """Bytes a tensor takes in the file; 0 if layout, format and shape do not go together."""
    if layout == "plain":
        count = 1
        for dim in shape:
            count *= dim
        return 4 * count if fmt == "f32" else 0
    if len(shape) != 2:
        return 0
    try:
        return packed_bytes(fmt, *shape) if layout == "p32" else expert_bytes(fmt, shape[1], shape[0])
    except EngineError:
        return 0


def align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def file_bytes(entries: Iterable[TensorEntry], blobs: Mapping[str, bytes], reserve: int) -> int:
    """Size of the file that holds these tensors and blobs behind a descriptor region of `reserve` bytes, alignment counted."""
    end = HEADER_BYTES + reserve
    for blob in blobs.values():
        end = align(end, BLOB_ALIGNMENT) + len(blob)
    for entry in entries:
        end = align(end, LAYOUT_ALIGNMENT[entry.layout]) + stored_bytes(entry.layout, entry.format, entry.shape)
    return end


def parse_header(path: Path, data: bytes, size: int) -> Header:
    """Checks the first 64 bytes of a file of `size` bytes."""
    if size < HEADER_BYTES or len(data) < HEADER_BYTES:
        raise ContainerError(f"{path}: is {size} bytes long, too short for a Colibri container; convert the model again")
    magic, version, order, offset, length, file_length, crc = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ContainerError(f"{path}: is not a Colibri container (no magic at offset 0); make one with `colibri convert`")
    if struct.unpack_from("<I", data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]):
        raise ContainerError(f"{path}: the header is damaged (checksum at offset {_HEADER.size}); convert the model again")
    if version != VERSION or order != BYTE_ORDER:
        raise ContainerError(f"{path}: container version {version} (byte order mark {order:#x}) is not one this program reads ({VERSION})")
    if file_length != size:
        raise ContainerError(f"{path}: the header says {file_length} bytes, the file has {size}: truncated or overwritten; convert again")
    if offset < HEADER_BYTES or length > MAX_DESCRIPTOR_BYTES or offset + length > size:
        raise ContainerError(f"{path}: the descriptor at offset {offset}, {length} bytes, does not lie in the file of {size} bytes")
    return Header(offset, length, file_length, crc)


def parse_descriptor(path: Path, header: Header, data: bytes) -> dict[str, Json]:
    """Checks the descriptor's checksum and reads its JSON."""
    if zlib.crc32(data) != header.descriptor_crc:
        raise ContainerError(f"{path}: the descriptor at offset {header.descriptor_offset} is damaged (checksum); convert the model again")
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ContainerError(f"{path}: the descriptor at offset {header.descriptor_offset} is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ContainerError(f"{path}: the descriptor at offset {header.descriptor_offset} is no JSON object")
    return parsed


def parse_tables(path: Path, header: Header, descriptor: Mapping[str, Json]) -> tuple[dict[str, TensorEntry], dict[str, BlobEntry]]:
    """Tensor and blob tables, each entry checked on its own and against its neighbours."""
    tensors: dict[str, TensorEntry] = {}
    rows = descriptor.get("tensors")
    if not isinstance(rows, list):
        raise ContainerError(f"{path}: the descriptor has no tensor table")
    for row in rows:
        entry = _tensor_entry(path, header, row)
        if entry.name in tensors:
            raise ContainerError(f"{path}: tensor {entry.name} is listed twice")
        tensors[entry.name] = entry
    table = descriptor.get("blobs", {})
    if not isinstance(table, dict):
        raise ContainerError(f"{path}: the blob table is no JSON object")
    blobs = {name: _blob_entry(path, header, name, row) for name, row in table.items()}
    _check_overlap(path, tensors, blobs)
    return tensors, blobs


def _tensor_entry(path: Path, header: Header, row: Json) -> TensorEntry:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ContainerError(f"{path}: a tensor table entry has no name")
    name = str(row["name"])
    layout, fmt, shape = row.get("layout"), row.get("format"), row.get("shape")
    if layout not in LAYOUT_ALIGNMENT or fmt not in FORMAT_NAMES:
        raise ContainerError(f"{path}: tensor {name} has layout {layout!r} and format {fmt!r}, which this program does not know")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 2:
        raise ContainerError(f"{path}: tensor {name} has no shape of one or two dimensions")
    dims = tuple(_integer(path, name, "shape", dim, 1, _MAX_DIM) for dim in shape)
    offset, length = _span(path, header, f"tensor {name}", row)
    expected = stored_bytes(str(layout), str(fmt), dims)
    if length != expected:
        raise ContainerError(f"{path}: tensor {name} at offset {offset} has {length} bytes, its shape {list(dims)} needs {expected}")
    if offset % LAYOUT_ALIGNMENT[str(layout)]:
        raise ContainerError(f"{path}: tensor {name} at offset {offset} is not aligned to {LAYOUT_ALIGNMENT[str(layout)]}")
    return TensorEntry(name, str(layout), str(fmt), dims, offset, length, str(row.get("sha256", "")))


def _blob_entry(path: Path, header: Header, name: str, row: Json) -> BlobEntry:
    if not isinstance(row, dict):
        raise ContainerError(f"{path}: the entry of blob {name} is no JSON object")
    offset, length = _span(path, header, f"blob {name}", row)
    return BlobEntry(offset, length, str(row.get("sha256", "")))


def _span(path: Path, header: Header, what: str, row: Mapping[str, Json]) -> tuple[int, int]:
    offset = _integer(path, what, "offset", row.get("offset"), 0, header.file_length)
    length = _integer(path, what, "length", row.get("length"), 0, header.file_length)
    if offset < header.descriptor_offset + header.descriptor_length or offset + length > header.file_length:
        raise ContainerError(f"{path}: {what} at offset {offset}, {length} bytes, does not lie between descriptor and end of file")
    return offset, length


def _integer(path: Path, what: str, key: str, value: Json, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ContainerError(f"{path}: {what}: {key} is {value!r}, wanted an integer of {low}..{high}")
    return value


def _check_overlap(path: Path, tensors: Mapping[str, TensorEntry], blobs: Mapping[str, BlobEntry]) -> None:
    spans = [(entry.offset, entry.length, f"tensor {name}") for name, entry in tensors.items()]
    spans += [(entry.offset, entry.length, f"blob {name}") for name, entry in blobs.items()]
    spans.sort()
    for (offset, length, name), (following, _, other) in pairwise(spans):
        if offset + length > following:
            raise ContainerError(f"{path}: {name} at offset {offset}, {length} bytes, overlaps {other} at offset {following}")
