"""Where a container's matrices lie, as far as placement wants to know: read from the header and the tensor table (docs/container.md)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_HEADER = struct.Struct("<8sIIQQQII")
_MAGIC = b"COLIBRI\0"
_MAX_DESCRIPTOR = 64 << 20
_BLOCK_BYTES = {"f32": 4096, "bf16": 2048, "int8": 1088, "int4": 576}  # of 32 rows x 32 columns
_EXPERT = re.compile(r"layers\.(\d+)\.experts\.\d+")
_OF_LAYER = re.compile(r"layers\.(\d+)\..+")


class LayoutError(ValueError):
    """The file is no container, or its tensor table makes no sense."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`units` runs of rows, of `unit_bytes` each, that follow one another from `offset` and that no task cuts."""

    offset: int
    units: int
    unit_bytes: int

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.offset + self.units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert's block: the fused gate and up matrix, then down."""

    gate_up: Matrix
    down: Matrix

    @property
    def bytes(self) -> int:
        """Of both matrices."""
        return self.down.end - self.gate_up.offset


@dataclass(frozen=True, slots=True)
class Layout:
    """backbone: every panelled matrix outside the experts, the embedding included. layers: each layer's experts, in order. whole: first
    byte and end of each of a layer's tensors, its experts included."""

    size: int
    backbone: tuple[Matrix, ...]
    layers: tuple[tuple[Expert, ...], ...]
    whole: tuple[tuple[tuple[int, int], ...], ...] = ()


def read_layout(fd: int) -> Layout:
    """The layout of an open container. LayoutError, OSError."""
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or raw[:8] != _MAGIC:
        raise LayoutError("it is no Colibri container")
    _, _, _, offset, length, size, _, _ = _HEADER.unpack(raw)
    if length > _MAX_DESCRIPTOR or size != os.fstat(fd).st_size:
        raise LayoutError("its header does not fit its length")
    try:
        return make_layout(size, json.loads(os.pread(fd, length, offset)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(f"its descriptor is malformed: {error!r}") from error


def header_end(fd: int) -> int:
    """The first byte behind an open container's header and descriptor, which are all that opening it reads; the file's end if what it
    begins with can't be believed. OSError."""
    size = os.fstat(fd).st_size
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or raw[:8] != _MAGIC:
        return size
    _, _, _, offset, length, _, _, _ = _HEADER.unpack(raw)
    return min(size, offset + length) if length <= _MAX_DESCRIPTOR else size


def read_digest(fd: int) -> str:
    """SHA-256, in hex, of an open container's header and descriptor: the tensors' checksums are in it, so the same weights have the same.
    LayoutError, OSError."""
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or raw[:8] != _MAGIC:
        raise LayoutError("it is no Colibri container")
    _, _, _, offset, length, _, _, _ = _HEADER.unpack(raw)
    if length > _MAX_DESCRIPTOR:
        raise LayoutError("its header does not fit its length")
    return hashlib.sha256(raw + os.pread(fd, length, offset)).hexdigest()


def make_layout(size: int, descriptor: Mapping[str, object]) -> Layout:
    """The layout that a descriptor tells of. LayoutError, KeyError, TypeError, ValueError if it makes no sense."""
    backbone: list[Matrix] = []
    layers: dict[int, list[Expert]] = {}
    whole: dict[int, list[tuple[int, int]]] = {}
    tensors = descriptor["tensors"]
    if not isinstance(tensors, list):
        raise LayoutError("the tensor table is no list")
    for entry in tensors:
        if match := _OF_LAYER.fullmatch(entry["name"]):
            whole.setdefault(int(match[1]), []).append((entry["offset"], entry["offset"] + entry["length"]))
        if entry["layout"] == "p32":
            backbone.append(_matrix(entry["format"], entry["shape"], entry["offset"]))
        elif match := _EXPERT.fullmatch(entry["name"]):
            layers.setdefault(int(match[1]), []).append(_expert(entry["format"], entry["shape"], entry["offset"]))
    numbers = sorted(layers)
    layout = Layout(size, tuple(backbone), tuple(tuple(layers[n]) for n in numbers), tuple(tuple(whole.get(n, ())) for n in numbers))
    if any(not 0 <= matrix.offset < matrix.end <= size for matrix in (*backbone, *(x.down for layer in layout.layers for x in layer))):
        raise LayoutError("a tensor lies outside the file")
    return layout


def _matrix(format_name: str, shape: Sequence[int], offset: int) -> Matrix:
    rows, columns = shape
    return Matrix(offset, -(-rows // 32), -(-columns // 32) * _BLOCK_BYTES[format_name])


def _expert(format_name: str, shape: Sequence[int], offset: int) -> Expert:
    """Gate and up are cut at pairs of panels: two give one group of the hidden activation."""
    ffn, hidden = shape
    gate_up = Matrix(offset, -(-ffn // 32), 2 * -(-hidden // 32) * _BLOCK_BYTES[format_name])
    return Expert(gate_up, _matrix(format_name, (hidden, ffn), gate_up.end))
