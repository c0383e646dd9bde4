"""The model's bytes as a descriptor that workers can map: the file itself, or a sealed copy in memory on huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from workers.topology import read_topology

log = logging.getLogger("colibri.workers")

LoadMode = Literal["auto", "map", "memfd"]

HUGE_PAGE = 2 << 20
PIECE = 256 << 20
"""Bytes copied, and collapsed to huge pages, at a time."""
RESERVE = 64 << 20
"""Memory that must stay free beside a copy of the model."""
MADV_COLLAPSE = 25  # Linux 6.1
PROT_NONE = 0
MAP_FIXED = 0x10
MAP_FAILED = ctypes.c_void_p(-1).value


class SegmentError(RuntimeError):
    """The model's file can't be opened or copied; says why and what to do."""


@dataclass(slots=True)
class ModelSegment:
    """An open descriptor of `bytes` bytes, exactly the container's length. huge_bytes of them lie on huge pages (0: not known)."""

    fd: int
    mode: Literal["map", "memfd"]
    bytes: int
    huge_bytes: int = 0

    def close(self) -> None:
        """Gives the descriptor back; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_segment(path: str | os.PathLike[str], *, mode: LoadMode = "map", available: int | None = None) -> ModelSegment:
    """Opens a model for sharing. "map": the file, through the page cache. "memfd": a copy that nobody can change or resize any more, on
    huge pages where the kernel can. "auto": the copy, which decodes faster, if it takes at most half of the free memory, else the file.

    available overrides what the machine and its control groups leave, in bytes. SegmentError if the file can't be read or the copy does not
    fit.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO is refused later, not waited for
    except OSError as refusal:
        raise SegmentError(f"{path}: {refusal.strerror}") from refusal
    file = ModelSegment(fd, "map", os.fstat(fd).st_size)
    if mode == "map":
        return file
    if available is None:
        available = read_topology().memory_available_bytes
    if mode == "auto" and not 0 < 2 * file.bytes + RESERVE <= available:
        return file
    with file:
        _check_room(path, file.bytes, available)
        return _copy(path, file)


def _check_room(path: str | os.PathLike[str], size: int, available: int) -> None:
    if size == 0:
        raise SegmentError(f"{path}: the file is empty")
    if size + RESERVE > available:
        raise SegmentError(
            f"{path}: a copy in memory needs {_mib(size + RESERVE)}, {_mib(available)} is free; use load mode map, which needs no copy"
        )


def _copy(path: str | os.PathLike[str], file: ModelSegment) -> ModelSegment:
    copy = ModelSegment(os.memfd_create(f"colibri:{Path(path).name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "memfd", file.bytes)
    try:
        os.ftruncate(copy.fd, file.bytes)
        with _mapped(copy.fd, file.bytes) as address:
            _fill(path, file, address)
            copy.huge_bytes = _collapse(address, file.bytes)
        # Sealing against writing is refused as long as a writable mapping is there, hence after the with block.
        fcntl.fcntl(copy.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as refusal:
        copy.close()
        raise SegmentError(f"{path}: no copy in memory could be made: {refusal.strerror}; use load mode map") from refusal
    except BaseException:
        copy.close()
        raise
    return copy


def _fill(path: str | os.PathLike[str], file: ModelSegment, address: int) -> None:
    """Reads the file into the mapping, in pieces."""
    at = 0
    while at < file.bytes:
        count = min(PIECE, file.bytes - at)
        piece = (ctypes.c_char * count).from_address(address + at)
        got = os.preadv(file.fd, [piece], at)
        if got == 0:
            raise SegmentError(f"{path}: the file became shorter while it was read ({at} of {file.bytes} bytes)")
        at += got


# ---------------------------------------------------------------- mappings, which Python's mmap module can't align


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


@contextlib.contextmanager
def _mapped(fd: int, size: int) -> Iterator[int]:
    """A writable shared mapping of a descriptor at a multiple of the huge page size, inside a larger reservation. Yields its address."""
    libc = _libc()
    room = size + HUGE_PAGE
    reserved = libc.mmap(None, room, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        aligned = -(-int(reserved) // HUGE_PAGE) * HUGE_PAGE
        if libc.mmap(aligned, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        yield aligned
    finally:
        libc.munmap(reserved, room)


def _collapse(address: int, size: int) -> int:
    """Asks for huge pages, piece by piece. Returns the bytes that got them; a refusal costs speed, nothing else."""
    libc = _libc()
    done = 0
    for at in range(0, size // HUGE_PAGE * HUGE_PAGE, PIECE):
        count = min(PIECE, size // HUGE_PAGE * HUGE_PAGE - at)
        if libc.madvise(address + at, count, MADV_COLLAPSE) == 0:
            done += count
        elif ctypes.get_errno() != errno.EAGAIN:
            log.info("no huge pages for the model's copy: %s", os.strerror(ctypes.get_errno()))
            break
    return done


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
