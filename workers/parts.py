"""The parts a model's bytes lie in, and how a process is told of them. Workers import this: the standard library and the engine only."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence

from engine_c import Part

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can change or resize the memory any more."""

_ENTRY = struct.Struct("<iiQQ")


def write_table(parts: Sequence[Part]) -> int:
    """A sealed memory file that lists the parts; its descriptor is the caller's."""
    fd = os.memfd_create("colibri:parts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(b"".join(_ENTRY.pack(part.fd, part.node, part.offset, part.bytes) for part in parts))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_table(fd: int) -> tuple[Part, ...]:
    """The parts that write_table wrote. ValueError if it is no such table."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    if not data or len(data) % _ENTRY.size:
        raise ValueError(f"a table of {len(data)} bytes lists no parts of a model")
    return tuple(Part(*entry) for entry in _ENTRY.iter_unpack(data))
