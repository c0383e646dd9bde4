"""Moves an expert's pages to another node, or copies them there, while others read them. Slowly on purpose: requests come first."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine_c import Part
from workers import numa
from workers.layout import Expert
from workers.mapping import HUGE_PAGE, MADV_COLLAPSE, MADV_POPULATE_READ, advise, mapped
from workers.parts import seal
from workers.placement import PAGE, Extent

CHUNK = HUGE_PAGE
"""Bytes moved by one system call: meanwhile this process can't map memory, and who reads these pages waits."""
REST = 4.0
"""After each chunk nothing is done for so many times as long as it took: lanes want the CPU and the memory."""
LEAST = 0.95
"""Of the pages, how many must have arrived."""
TRIES = 20
"""How often a chunk is tried while pages of it are held: by a system call that reads them, or a huge page that finds no free block."""
RETRY_S = 0.05
"""Between tries, in seconds: a second in all, far longer than the kernel holds a page for its own ends."""


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
    for part in parts:
        if refused := _move(part, target, rest):
            for moved in parts:
                _move(moved, source, rest)
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
            if refused := _move_chunk(base + at, stop - at, node, rest):
                return refused
            rest((time.monotonic() - began) * REST)
            at = stop
    return ""


def _move_chunk(address: int, length: int, node: int, rest: Callable[[float], object]) -> str:
    """Returns what was refused. The kernel says "busy" of a huge page that it split and then moved, too: where the pages are decides."""
    for _ in range(TRIES):
        refused, busy = numa.move_memory(address, length, node)
        if not busy:
            break
        rest(RETRY_S)
    return _astray(address, length, node, unknown=refused) if busy or not refused else refused


def _astray(address: int, length: int, node: int, *, unknown: str = "") -> str:
    """What is wrong if not nearly all of these pages are on a node; `unknown` if the kernel does not say."""
    found = numa.pages_elsewhere(address, length, PAGE, node)
    if found is None:
        return unknown
    return "" if found[0] <= (1 - LEAST) * found[1] else f"{found[0]} of {found[1]} pages did not get to NUMA node {node}"


def copy(source: Part, size: int, node: int, cpus: Sequence[int], *, rest: Callable[[float], object] = time.sleep) -> tuple[Part, str]:
    """A sealed copy of a part in a node's memory, in a memory file of the container's `size` with the bytes at the same offset, and what
    was refused on the way. cpus: the node's. The descriptor is the caller's. MoveError."""
    fd = os.memfd_create(f"colibri:expert-at-{source.offset}:node{node}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # On a thread of its own, which can keep to the node's CPUs: where memory policies are refused, the first to touch a page decides.
        with ThreadPoolExecutor(1, thread_name_prefix="colibri-copy") as pool:
            refused = pool.submit(_fill, fd, source, node, cpus, rest).result()
        seal(fd)
    except OSError as refusal:
        os.close(fd)
        raise MoveError(f"no copy could be made on node {node}: {refusal.strerror}") from refusal
    except BaseException:
        os.close(fd)
        raise
    return Part(fd, node, source.offset, source.bytes), refused


def _fill(fd: int, source: Part, node: int, cpus: Sequence[int], rest: Callable[[float], object]) -> str:
    if cpus:
        numa.run_on(cpus)
    shift = source.offset % HUGE_PAGE
    with mapped(fd, shift + source.bytes, writable=True, offset=source.offset - shift) as base:
        refused = numa.bind_memory(base, shift + source.bytes, node)
        at, end = shift, shift + source.bytes
        while at < end:
            began = time.monotonic()
            stop = min(end, at // CHUNK * CHUNK + CHUNK)
            if stop - at == HUGE_PAGE:
                ctypes.c_char.from_address(base + at).value = b"\0"
                advise(base + at, HUGE_PAGE, MADV_COLLAPSE)
            into = (ctypes.c_char * (stop - at)).from_address(base + at)
            if os.preadv(source.fd, [into], source.offset - shift + at) != stop - at:
                raise MoveError(f"the expert at byte {source.offset} can't be read")
            if astray := _astray(base + at, stop - at, node):
                raise MoveError(refused or astray)
            rest((time.monotonic() - began) * REST)
            at = stop
    return refused
