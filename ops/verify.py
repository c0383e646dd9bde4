"""`colibri verify`: is a container whole? Checksums of every tensor and blob, and whether the engine accepts the file."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass

from engine_c import EngineError, Model
from ops.container import BlobEntry, Container, ContainerError, TensorEntry
from service.printable import counted

_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found whole."""

    tensors: int
    blobs: int
    bytes_read: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes_read / max(self.seconds, 1e-9) / 1e6
        what = f"{counted(self.tensors, 'tensor')} and {counted(self.blobs, 'embedded file')}"
        return f"whole: {what}, {self.bytes_read / 1e6:,.1f} MB ({rate:,.0f} MB/s)"


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Reads the whole container. Raises ContainerError naming the first damaged tensor and its offset."""
    started = time.monotonic()
    with Container.open(path) as container:
        for name, entry in container.tensors.items():
            _check(container, f"tensor {name}", entry)
        for name, blob in container.blobs.items():
            _check(container, f"blob {name}", blob)
        read = sum(entry.length for entry in container.tensors.values()) + sum(blob.length for blob in container.blobs.values())
        try:
            Model.open(path).close()
        except EngineError as error:
            raise ContainerError(f"{container.path}: the bytes are whole, but the engine does not accept the model: {error}") from error
        return VerifyReport(len(container.tensors), len(container.blobs), read, time.monotonic() - started)


def _check(container: Container, what: str, entry: TensorEntry | BlobEntry) -> None:
    if not entry.sha256:
        raise ContainerError(f"{container.path}: {what} at offset {entry.offset} has no checksum; convert the model again")
    digest = hashlib.sha256()
    for start in range(entry.offset, entry.offset + entry.length, _CHUNK):
        digest.update(container.read(start, min(_CHUNK, entry.offset + entry.length - start)))
    if digest.hexdigest() != entry.sha256:
        raise ContainerError(f"{container.path}: {what} at offset {entry.offset}, {entry.length} bytes, is damaged; convert again")
