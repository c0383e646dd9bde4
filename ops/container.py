"""Reads and writes `.colibri` containers (docs/container.md). The engine has its own parser; this one serves the tools."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_c.packing import unpack, unpack_expert
from ops.container_layout import (
    HEADER_BYTES,
    BlobEntry,
    ContainerError,
    Json,
    TensorEntry,
    parse_descriptor,
    parse_header,
    parse_tables,
)
from ops.container_writer import ContainerWriter

__all__ = ["BlobEntry", "Container", "ContainerError", "ContainerWriter", "Json", "TensorEntry", "dequantise_container"]

F32: TypeAlias = NDArray[np.float32]


class Container:
    """An opened container, mapped read-only. Header, descriptor and table are checked by `open`; tensor bytes are not (see ops.verify)."""

    def __init__(self, path: Path, mapping: mmap.mmap, descriptor: dict[str, Json]) -> None:
        self.path = path
        self.descriptor = descriptor
        self._mapping = mapping
        header = parse_header(path, mapping[:HEADER_BYTES], len(mapping))
        self.file_bytes = header.file_length
        self.tensors, self.blobs = parse_tables(path, header, descriptor)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Container:
        """Raises ContainerError for a file that is missing, truncated, damaged or no container."""
        where = Path(path)
        try:
            with where.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = parse_header(where, file.read(HEADER_BYTES), size)
                mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise ContainerError(f"{where}: cannot be read: {error.strerror or error}") from error
        try:
            text = mapping[header.descriptor_offset : header.descriptor_offset + header.descriptor_length]
            return cls(where, mapping, parse_descriptor(where, header, text))
        except BaseException:
            mapping.close()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._mapping.close()

    def entry(self, name: str) -> TensorEntry:
        try:
            return self.tensors[name]
        except KeyError:
            raise ContainerError(f"{self.path}: has no tensor {name}") from None

    def tensor(self, name: str) -> bytes:
        """The stored bytes of a tensor, copied."""
        entry = self.entry(name)
        return self.read(entry.offset, entry.length)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the file, copied."""
        return self._mapping[offset : offset + length]

    def dequantise(self, name: str) -> tuple[F32, ...]:
        """The values of a tensor as the engine reads them: one array, or gate, up [ffn, hidden] and down [hidden, ffn] of an expert."""
        entry = self.entry(name)
        stored = np.frombuffer(self.tensor(name), np.uint8)
        if entry.layout == "plain":
            return (stored.view(np.float32).reshape(entry.shape),)
        first, second = entry.shape
        if entry.layout == "p32":
            return (unpack(entry.format, stored, first, second),)
        return unpack_expert(entry.format, stored, second, first)

    def blob(self, name: str) -> bytes:
        """An embedded file."""
        entry = self.blobs.get(name)
        if entry is None:
            raise ContainerError(f"{self.path}: has no {name} embedded")
        return self.read(entry.offset, entry.length)


def dequantise_container(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Writes a container of the same model with every weight in f32, exactly the values `source` holds after dequantisation."""
    with Container.open(source) as model:
        descriptor = {key: value for key, value in model.descriptor.items() if key not in ("tensors", "blobs")}
        with ContainerWriter(Path(out), {**descriptor, "quant": "f32"}) as writer:
            for name in model.blobs:
                writer.add_blob(name, model.blob(name))
            for name, entry in model.tensors.items():
                values = model.dequantise(name)
                if entry.layout == "plain":
                    writer.add_plain(name, values[0])
                elif entry.layout == "p32":
                    writer.add_packed(name, "f32", values[0])
                else:
                    gate, up, down = values
                    _, layer, _, expert = name.split(".")
                    writer.add_expert(int(layer), int(expert), "f32", gate, up, down)
            writer.commit()
