"""Mappings of shared memory that Python's mmap module can't make: at a multiple of the huge page size, collapsed, bound to a node."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator

HUGE_PAGE = 2 << 20
PAGE = 4096

MADV_DONTFORK = 10
MADV_POPULATE_READ = 22  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1
_PROT_NONE = 0
_MAP_FIXED = 0x10
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate
_MAP_FAILED = ctypes.c_void_p(-1).value


def _open_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


_libc = _open_libc()


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@contextlib.contextmanager
def mapped(fd: int, size: int, *, writable: bool, offset: int = 0) -> Iterator[int]:
    """A shared mapping of `size` bytes of a descriptor, at a multiple of the huge page size. Yields its address. OSError.

    A process that is started meanwhile does not inherit it: until its program ran, nobody could seal the memory.
    """
    room = size + HUGE_PAGE
    reserved = _libc.mmap(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _MAP_FAILED:
        raise _failure()
    try:
        aligned = -(-int(reserved) // HUGE_PAGE) * HUGE_PAGE
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if _libc.mmap(aligned, size, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) == _MAP_FAILED:
            raise _failure()
        advise(aligned, size, MADV_DONTFORK)
        yield aligned
    finally:
        _libc.munmap(reserved, room)


def advise(address: int, length: int, advice: int) -> int:
    """madvise with the GIL released. Returns 0 or an errno."""
    return ctypes.get_errno() if _libc.madvise(address, length, advice) else 0


def punch(fd: int, offset: int, length: int) -> int:
    """Gives back the memory of some pages of a file, the last of which may end behind it: they are zero then. Returns 0 or an errno."""
    length = -(-length // PAGE) * PAGE
    return ctypes.get_errno() if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) else 0
