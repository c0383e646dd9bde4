"""Copying a file into memory with huge pages, without Python's lock: threads that do it disturb nobody who imports or steps meanwhile."""

from __future__ import annotations

from engine_c._engine import ffi, lib
from engine_c.library import fail


def fill(file: int, address: int, begin: int, end: int) -> int:
    """Copies the bytes from begin to end of a file into a mapping of memory at `address` in which it lies from byte 0 on. Returns 0, or the
    errno with which the kernel refused huge pages. EngineError EIO: the file can't be read or has become shorter."""
    unhuge, err = ffi.new("int[]", 1), ffi.new("colibri_error *")
    if lib.colibri_fill(file, ffi.cast("void *", address), begin, end, unhuge, err):
        raise fail(err)
    return unhuge[0]
