"""The parts a model's bytes lie in, and how a process is told of them. Workers import this: the standard library and the engine only."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Sequence

from engine_c.basics import Part

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can change or resize the memory any more."""

_ENTRY = struct.Struct("<iiQQ")


def overlay(parts: Sequence[Part], over: Sequence[Part]) -> tuple[Part, ...]:
    """Parts with others, which lie within them and do not overlap, in place of the bytes they have."""
    for new in over:
        parts = [
            piece
            for part in parts
            for piece in (
                _clip(part, part.offset, min(part.offset + part.bytes, new.offset)),
                new if part.offset <= new.offset < part.offset + part.bytes else None,
                _clip(part, max(part.offset, new.offset + new.bytes), part.offset + part.bytes),
            )
            if piece is not None
        ]
    return tuple(parts)


def filled_up(parts: Sequence[Part], rest: Sequence[Part]) -> tuple[Part, ...]:
    """Parts with pieces of the rest wherever they leave out bytes that it has; both ascend."""
    whole: list[Part | None] = []
    at, i = 0, 0
    for under in rest:
        at, end = max(at, under.offset), under.offset + under.bytes
        while i < len(parts) and parts[i].offset < end:
            whole += [_clip(under, at, parts[i].offset), parts[i]]
            at, i = parts[i].offset + parts[i].bytes, i + 1
        whole.append(_clip(under, at, end))
    return tuple(part for part in whole if part is not None)


def within(parts: Sequence[Part], offset: int, size: int) -> tuple[Part, ...]:
    """The pieces of parts that hold the bytes [offset, offset + size)."""
    pieces = (_clip(part, max(part.offset, offset), min(part.offset + part.bytes, offset + size)) for part in parts)
    return tuple(piece for piece in pieces if piece is not None)


def _clip(part: Part, begin: int, end: int) -> Part | None:
    return Part(part.fd, part.node, begin, end - begin) if begin < end else None


def seal(fd: int, seconds: float = 2.0) -> None:
    """Seals a memory file that nobody here has mapped any more. OSError.

    A process that was started between a mapping of ours and its MADV_DONTFORK has it until its program runs: it is waited for.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return
        except OSError as refusal:
            if refusal.errno != errno.EBUSY or time.monotonic() >= end:
                raise
        time.sleep(0.002)


def write_table(parts: Sequence[Part]) -> int:
    """A sealed memory file that lists the parts; its descriptor is the caller's."""
    fd = os.memfd_create("colibri:parts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(b"".join(_ENTRY.pack(part.fd, part.node, part.offset, part.bytes) for part in parts))
        seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


PART_RECORD = struct.Struct("<iQQ")
"""A part on its way to a worker: node, offset and bytes; its descriptor goes beside it."""


def read_record(data: bytes, descriptor: bytes) -> Part:
    """A part that came over a control socket, with the descriptor it came with, which is the receiver's."""
    node, offset, size = PART_RECORD.unpack(data)
    (fd,) = struct.unpack("=i", descriptor)
    return Part(fd, node, offset, size)


def read_table(fd: int) -> tuple[Part, ...]:
    """The parts that write_table wrote. ValueError if it is no such table."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    if not data or len(data) % _ENTRY.size:
        raise ValueError(f"a table of {len(data)} bytes lists no parts of a model")
    return tuple(Part(*entry) for entry in _ENTRY.iter_unpack(data))
