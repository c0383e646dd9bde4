"""What the kernel is asked about NUMA memory, by raw system calls: there is no libnuma to depend on.

A refusal (containers without SYS_NICE get EPERM) costs speed, nothing else: it is returned as text for somebody to say once.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

MPOL_PREFERRED = 1
MPOL_BIND = 2
MPOL_MF_STRICT = 1
MPOL_MF_MOVE_ALL = 4
_MASK_BITS = 1024
_WORD = 64

_NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "move_pages": 279},
    "aarch64": {"mbind": 235, "set_mempolicy": 237, "move_pages": 239},
}


class MemoryUse(NamedTuple):
    """A mapping's pages that this process has in its page tables: bytes on each node, and the policy the kernel follows there."""

    policy: str
    bytes_on: dict[int, int]


def bind_memory(address: int, length: int, node: int, *, strictly: bool = True) -> str:
    """Asks for a mapping's pages, none of which may have been touched yet, to come from one node. For shared memory this holds for whoever
    touches them first, in any process, and keeps automatic balancing from moving them.

    strictly: never from another node, not even when the node is full. Returns what was refused, "" if nothing.
    """
    return _call("mbind", address, length, MPOL_BIND if strictly else MPOL_PREFERRED, node)[0]


def move_memory(address: int, length: int, node: int) -> tuple[str, bool]:
    """Moves a mapping's pages, which must be in this process's page tables, to a node, whoever has mapped them, and binds them there.
    Others may read them meanwhile. Needs CAP_SYS_NICE. Returns what was refused, "" if nothing, and whether that was because some pages
    were held at that moment, or had to be split: trying again may help."""
    refused, number = _call("mbind", address, length, MPOL_BIND, node, flags=MPOL_MF_STRICT | MPOL_MF_MOVE_ALL)
    return refused, number == errno.EIO


def prefer_memory(node: int) -> str:
    """Asks for the calling thread's, and its later threads', memory of a node where there is some. Returns what was refused."""
    return _call("set_mempolicy", None, None, MPOL_PREFERRED, node)[0]


def run_on(cpus: Iterable[int]) -> str:
    """Keeps the calling thread, and its later threads, on these CPUs. Returns what was refused, "" if nothing."""
    wanted = sorted(cpus)
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as refusal:
        return f"CPUs {','.join(map(str, wanted))}: {refusal.strerror}"
    return ""


def memory_use(address: int, path: str = "/proc/self/numa_maps") -> MemoryUse | None:
    """What the kernel says of the mapping that begins at address; None if it says nothing (no NUMA in it, /proc hidden)."""
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    begin = f"{address:x} "
    return next((parse_numa_maps_line(line) for line in lines if line.lstrip("0").startswith(begin)), None)


def pages_elsewhere(address: int, length: int, page: int, node: int) -> tuple[int, int] | None:
    """Pages of a mapping that are on other nodes than this, and all that are in this process's page tables; None if the kernel does not
    say. Cheap: numa_maps would go through all that the process has mapped."""
    number = _NUMBERS.get(os.uname().machine, {}).get("move_pages")
    count = -(-length // page)
    pages = (ctypes.c_void_p * count)(*range(address, address + length, page))
    nodes = (ctypes.c_int * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    if number is None or libc.syscall(ctypes.c_long(number), 0, ctypes.c_ulong(count), pages, None, nodes, 0):
        return None
    there = [found for found in nodes if found >= 0]
    return len(there) - there.count(node), len(there)


def parse_numa_maps_line(line: str) -> MemoryUse:
    """"7f00 bind:1 file=/memfd:x dirty=3 N1=3 kernelpagesize_kB=4" -> MemoryUse("bind:1", {1: 12288})."""
    words = line.split()
    counts, page = {}, 4096
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name == "kernelpagesize_kB":
            page = int(value) * 1024
        elif name[:1] == "N" and name[1:].isdigit():
            counts[int(name[1:])] = int(value)
    return MemoryUse(words[1], {node: count * page for node, count in counts.items()})


def _call(name: str, address: int | None, length: int | None, mode: int, node: int, *, flags: int = 0) -> tuple[str, int]:
    """Returns what was refused and the error's number; "" and 0 if nothing, 0 also if the kernel was not asked."""
    machine = os.uname().machine
    number = _NUMBERS.get(machine, {}).get(name)
    if number is None:
        return f"{name}: not known on {machine}", 0
    if not 0 <= node < _MASK_BITS:
        return f"{name}: node {node} is out of range", 0
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD))()
    mask[node // _WORD] = 1 << node % _WORD
    where = [] if address is None else [ctypes.c_void_p(address), ctypes.c_ulong(length or 0)]
    libc = ctypes.CDLL(None, use_errno=True)
    bits = ctypes.c_ulong(_MASK_BITS)
    last = [] if address is None else [ctypes.c_uint(flags)]
    if libc.syscall(ctypes.c_long(number), *where, ctypes.c_long(mode), mask, bits, *last):
        refusal = ctypes.get_errno()
        return f"{name} to NUMA node {node}: {os.strerror(refusal)}", refusal
    return "", 0
