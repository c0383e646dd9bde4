"""Moves an expert's pages to another node, or copies them there, while others read them. Slowly on purpose: requests come first."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_c import Part
from workers import numa
from workers.filling import FillError, Filling
from workers.layout import Expert
from workers.mapping import HUGE_PAGE, MADV_POPULATE_READ, advise, mapped
from workers.parts import SEALS
from workers.placement import PAGE, Extent
from workers.topology import Topology

CHUNK = HUGE_PAGE
"""Bytes moved by one system call: meanwhile this process can't map memory, and who reads these pages waits."""
REST = 1.0
"""After each chunk nothing is done for so many times as long as it took."""
LEAST = 0.95
"""Of the pages, how many must have arrived."""


class MoveError(RuntimeError):
    """The machine refused; says what. Everything is where it was."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [offset, offset + bytes) of the container, whole pages unless it ends there."""

    offset: int
    bytes: int

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.offset + self.bytes


def range_of(expert: Expert, size: int) -> Range:
    """The pages that hold an expert and nothing else, of a container of `size` bytes: its block is aligned to 4 KiB; where pages are
    larger, those at either end are its neighbours' too and stay."""
    begin = -(-expert.gate_up.offset // PAGE) * PAGE
    end = -(-expert.down.end // 4096) * 4096
    end = size if end >= size else end // PAGE * PAGE
    return Range(begin, max(0, end - begin))


def whole_pages(wanted: Range, filled: Sequence[Extent]) -> Range:
    """What is moved for a range: a huge page at either end, which moves as a whole, belongs to whoever has most of it."""
    begin, end = (_rounded(at, filled) for at in (wanted.offset, wanted.end))
    return Range(begin, max(0, end - begin))


def _rounded(at: int, filled: Sequence[Extent]) -> int:
    low = at // HUGE_PAGE * HUGE_PAGE
    huge = any(extent.offset <= low and low + HUGE_PAGE <= extent.offset + extent.bytes for extent in filled)
    return (low if at - low < HUGE_PAGE // 2 else low + HUGE_PAGE) if huge else at


def move(parts: Sequence[Part], source: int, target: int, *, rest: Callable[[float], object] = time.sleep) -> None:
    """Moves the pages of parts from one node to another. MoveError: they are, as far as the machine lets, back on the first."""
    refused = ""
    for part in parts:
        refused = refused or _move(part, target, rest)
    if not refused:
        found = [_on_node(part, target) for part in parts]
        missing = sum(part.bytes - got for part, got in zip(parts, found, strict=True) if got is not None)
        if missing > (1 - LEAST) * sum(part.bytes for part in parts):
            refused = f"{missing} bytes did not arrive on node {target}"
    if refused:
        for part in parts:
            _move(part, source, rest)
        raise MoveError(refused)


def _move(part: Part, node: int, rest: Callable[[float], object]) -> str:
    """Chunk by chunk. Returns what was refused."""
    shift = part.offset % HUGE_PAGE  # huge pages are mapped as such if they lie as in the file
    with mapped(part.fd, shift + part.bytes, writable=False, offset=part.offset - shift) as base:
        at, end = shift, shift + part.bytes
        while at < end:
            began = time.monotonic()
            stop = min(end, at // CHUNK * CHUNK + CHUNK)
            advise(base + at, stop - at, MADV_POPULATE_READ)
            if refused := numa.move_memory(base + at, stop - at, node):
                return refused
            rest((time.monotonic() - began) * REST)
            at = stop
    return ""


def _on_node(part: Part, node: int) -> int | None:
    """Bytes of a part that the kernel says are on a node; None if it says nothing."""
    with mapped(part.fd, part.bytes, writable=False, offset=part.offset) as address:
        advise(address, part.bytes, MADV_POPULATE_READ)
        use = numa.memory_use(address)
    return None if use is None else min(part.bytes, use.bytes_on.get(node, 0))


def copy(source: Part, size: int, node: int, topology: Topology) -> tuple[Part, tuple[str, ...]]:
    """A sealed copy of a part in a node's memory, in a memory file of the container's `size` with the bytes at the same offset, and what
    was refused on the way. The descriptor is the caller's. MoveError."""
    fd = os.memfd_create(f"colibri:expert-at-{source.offset}:node{node}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        filling = Filling(source.fd, size, {node: fd}, (Extent(node, source.offset, source.bytes),), topology, rest=REST)
        (share,) = filling.run()
        if share.on_node is not None and share.on_node < LEAST * share.bytes:
            raise MoveError(next(iter(filling.degraded), f"the copy does not lie on node {node}"))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except (FillError, OSError) as refusal:
        os.close(fd)
        raise MoveError(f"no copy could be made on node {node}: {refusal}") from refusal
    except BaseException:
        os.close(fd)
        raise
    return Part(fd, node, source.offset, source.bytes), filling.degraded
