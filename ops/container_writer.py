"""Writes `.colibri` containers: streamed, atomic, and without a trace when it fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_c.packing import pack, pack_expert
from ops.container_layout import (
    BLOB_ALIGNMENT,
    HEADER_BYTES,
    LAYOUT_ALIGNMENT,
    ContainerError,
    Header,
    Json,
    TensorEntry,
    align,
    stored_bytes,
)
from ops.temporaries import create_locked, remove_stale, temporary_name

F32: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

_ENTRY_BYTES = 320  # JSON of one tensor or blob entry, the longest names and numbers counted
_LAYER_TENSORS = 12  # most tensors a layer has beside its experts
_MODEL_TENSORS = 16  # embedding, head, norms, rotary frequencies and blobs


class ContainerWriter:
    """Context manager. Tensors go to a temporary file in the target's folder in the order they are added; `commit()` makes it the
    target. Leaving without `commit()`, by an exception, Ctrl-C or SIGTERM included, removes the temporary file; the one of a process that
    was killed is removed by the next writer to the same target.

    `descriptor` is the JSON descriptor without "tensors" and "blobs". `needed_bytes`, if known, is compared with the free space first."""

    def __init__(self, path: Path, descriptor: Mapping[str, Json], *, needed_bytes: int = 0) -> None:
        self.path = Path(path)
        self._descriptor = dict(descriptor)
        self._needed = needed_bytes
        self._reserve = descriptor_reserve(descriptor)
        self._end = HEADER_BYTES + self._reserve
        self._tensors: dict[str, TensorEntry] = {}
        self._blobs: dict[str, Json] = {}
        self._temporary: Path | None = None
        self._fd = -1
        self._signals = _RaiseOnTermination()

    def __enter__(self) -> ContainerWriter:
        folder = self.path.parent
        if self.path.is_dir():
            raise ContainerError(f"{self.path}: is a folder; name a file to write")
        if self.path.exists() and not self.path.is_file():
            raise ContainerError(f"{self.path}: is no regular file; name a file to write")
        if not folder.is_dir():
            raise ContainerError(f"{folder}: is no folder; make it first, or write elsewhere")
        remove_stale(self.path)
        self._check_space(folder)
        self._signals.install()
        self._temporary = temporary_name(self.path)
        try:
            self._fd = create_locked(self._temporary)
        except OSError as error:
            self._discard()
            raise self._os_error("create", error) from error
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._discard()

    def add_plain(self, name: str, array: F32) -> None:
        """A row-major f32 tensor."""
        data = np.ascontiguousarray(array, dtype=np.float32)
        if not np.isfinite(data).all():
            raise ContainerError(f"{self.path}: tensor {name} holds NaN or infinity")
        entry = TensorEntry(name, "plain", "f32", data.shape)
        self.add_segments(entry, [data.reshape(-1).view(np.uint8)])

    def add_packed(self, name: str, fmt: str, array: F32) -> None:
        """A matrix [n, k] in packed form."""
        self.add_segments(TensorEntry(name, "p32", fmt, array.shape), [pack(fmt, array)])

    def add_expert(self, layer: int, expert: int, fmt: str, gate: F32, up: F32, down: F32) -> None:
        """One expert: gate, up [ffn, hidden], down [hidden, ffn]."""
        entry = TensorEntry(f"layers.{layer}.experts.{expert}", "expert", fmt, gate.shape)
        self.add_segments(entry, [pack_expert(fmt, gate, up, down)])

    def add_segments(self, entry: TensorEntry, segments: Iterable[Bytes]) -> None:
        """A tensor whose stored bytes come in pieces, in order. Only one piece need be in memory at a time."""
        if entry.name in self._tensors:
            raise ContainerError(f"{self.path}: tensor {entry.name} was added twice")
        expected = stored_bytes(entry.layout, entry.format, entry.shape)
        offset, length, digest = self._append(LAYOUT_ALIGNMENT[entry.layout], segments)
        if length != expected or not length:
            raise ContainerError(f"{self.path}: tensor {entry.name} got {length} bytes, its shape {list(entry.shape)} needs {expected}")
        self._tensors[entry.name] = TensorEntry(entry.name, entry.layout, entry.format, entry.shape, offset, length, digest)

    def add_blob(self, name: str, data: bytes) -> None:
        """A file embedded as it is."""
        if name in self._blobs:
            raise ContainerError(f"{self.path}: blob {name} was added twice")
        offset, length, digest = self._append(BLOB_ALIGNMENT, [np.frombuffer(data, np.uint8)])
        self._blobs[name] = {"offset": offset, "length": length, "sha256": digest}

    def commit(self, *, check: Callable[[Path], None] | None = None) -> int:
        """Writes descriptor and header, lets `check` refuse the whole file (by raising), flushes it to the disk and gives it its name.
        Returns the file's size in bytes."""
        table: list[Json] = [entry.to_json() for entry in self._tensors.values()]
        text = json.dumps({**self._descriptor, "tensors": table, "blobs": self._blobs}, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > self._reserve:
            raise ContainerError(f"{self.path}: the descriptor takes {len(text)} bytes, {self._reserve} were set aside")
        header = Header(HEADER_BYTES, len(text), self._end, zlib.crc32(text))
        if self._temporary is None:
            raise ContainerError(f"{self.path}: commit() outside the context manager")
        try:
            self._write(0, header.to_bytes() + text)
            os.ftruncate(self._fd, self._end)
            if check is not None:
                check(self._temporary)
            os.fsync(self._fd)
            os.rename(self._temporary, self.path)
            self._temporary = None
            _sync_folder(self.path.parent)
        except OSError as error:
            raise self._os_error("write", error) from error
        return self._end

    def _append(self, alignment: int, segments: Iterable[Bytes]) -> tuple[int, int, str]:
        offset = position = align(self._end, alignment)
        digest = hashlib.sha256()
        for segment in segments:
            view = np.ascontiguousarray(segment).data.cast("B")
            digest.update(view)
            try:
                self._write(position, view)
            except OSError as error:
                raise self._os_error("write", error) from error
            position += len(view)
        self._end = position
        return offset, position - offset, digest.hexdigest()

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view[: 1 << 30], offset)
            view = view[written:]
            offset += written

    def _check_space(self, folder: Path) -> None:
        state = os.statvfs(folder)
        free = state.f_bavail * state.f_frsize
        if self._needed > free:
            raise ContainerError(f"{self.path}: needs {_mb(self._needed)}, {folder} has {_mb(free)} free; free space or write elsewhere")

    def _os_error(self, doing: str, error: OSError) -> ContainerError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = f" ({_mb(self._needed)} are needed in all)" if self._needed else ""
            return ContainerError(f"{self.path}: the disk is full{needed}; free space or write elsewhere")
        return ContainerError(f"{self.path}: cannot {doing} it: {error.strerror or error}")

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None
        self._signals.restore()


class _RaiseOnTermination:
    """While a container is written, SIGTERM and SIGHUP raise SystemExit in the main thread, so that clean-up runs. A handler that the
    program has set itself stays."""

    def __init__(self) -> None:
        self._changed: list[signal.Signals] = []

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._raise)
                self._changed.append(number)

    def restore(self) -> None:
        while self._changed:
            signal.signal(self._changed.pop(), signal.SIG_DFL)

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        for changed in self._changed:
            signal.signal(changed, signal.SIG_IGN)  # a second one must not interrupt the clean-up
        raise SystemExit(128 + number)


def descriptor_reserve(descriptor: Mapping[str, Json]) -> int:
    """Bytes set aside for the descriptor before the tensors, whose table is known only when all are written."""
    arch = descriptor.get("arch")
    if not isinstance(arch, dict):
        raise ContainerError("the descriptor has no arch")
    layers, experts = arch.get("layers"), arch.get("experts")
    if not isinstance(layers, int) or not isinstance(experts, int):
        raise ContainerError("the descriptor's arch does not say layers and experts")
    entries = layers * (_LAYER_TENSORS + experts) + _MODEL_TENSORS
    return align(len(json.dumps(descriptor)) + _ENTRY_BYTES * entries, 4096) - HEADER_BYTES


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
