"""The memory's plain reading speed, the limit decoding is held against. Taken with libc's memchr, which only loads and compares."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time

BYTES = 512 << 20  # well beyond any last-level cache
_FILL, _ABSENT = 1, 7


def read_bandwidth(*, threads: int | None = None, repeats: int = 5) -> float:
    """Best of `repeats`, in GB/s (1e9), of `threads` (default: every CPU we may use) each reading its own part of one buffer."""
    threads = threads or len(os.sched_getaffinity(0))
    libc = ctypes.CDLL(None)  # calls through it release the GIL
    libc.memchr.argtypes = libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.memchr.restype = libc.memset.restype = ctypes.c_void_p
    with mmap.mmap(-1, BYTES) as buffer:
        buffer.madvise(mmap.MADV_HUGEPAGE)
        view = ctypes.c_char.from_buffer(buffer)
        address, part = ctypes.addressof(view), BYTES // threads
        libc.memset(address, _FILL, BYTES)
        best = min(_timed(libc, address, part, threads) for _ in range(repeats))
        del view  # the mapping cannot close while a view of it lives
    return part * threads / best / 1e9


def _timed(libc: ctypes.CDLL, address: int, part: int, threads: int) -> float:
    readers = [threading.Thread(target=libc.memchr, args=(address + index * part, _ABSENT, part)) for index in range(threads)]
    begin = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return time.perf_counter() - begin
