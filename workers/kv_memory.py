"""KV heads on NUMA nodes: head h of H lies on nodes[h * N / H], where the engine prefers to compute its attention."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from engine_c import Session
from workers import numa
from workers.filling import NodeShare
from workers.mapping import MADV_POPULATE_READ, advise, mapped

LOOK_BYTES = 64 << 20
"""Of each head's used memory, how much is looked at to see where it lies."""


class KvMemory:
    """The KV part of a session's arena. nodes: those of the model's image, ascending; with fewer than two nothing is bound."""

    def __init__(self, session: Session, nodes: Sequence[int]) -> None:
        self.degraded: tuple[str, ...] = ()
        self._session = session
        heads = session.model.info.kv_heads
        self._homes = [nodes[head * len(nodes) // heads] for head in range(heads)] if len(nodes) > 1 else []

    def bind(self) -> None:
        """Before the first step. Not strictly: KV memory is touched while requests run, and a full node must not end them."""
        refused: dict[str, None] = {}
        for head, node in enumerate(self._homes):
            offset, size = self._session.kv_range(head)
            with mapped(self._session.arena_fd, size, writable=False, offset=offset) as address:
                refused[numa.bind_memory(address, size, node, strictly=False)] = None
        self.degraded = tuple(f"KV memory: {text}" for text in refused if text)

    def shares(self) -> tuple[NodeShare, ...]:
        """Where what has been used of it lies, by home node. Reads page tables: for an operator's question, not for every second."""
        used, there = dict.fromkeys(self._homes, 0), dict.fromkeys(self._homes, 0)
        for head, node in enumerate(self._homes):
            offset, size = self._session.kv_range(head)
            with mapped(self._session.arena_fd, size, writable=False, offset=offset) as address:
                for at, count in _used(self._session.arena_fd, offset, size):
                    advise(address + at - offset, count, MADV_POPULATE_READ)
                use = numa.memory_use(address)
            if use is not None:
                used[node] += sum(use.bytes_on.values())
                there[node] += use.bytes_on.get(node, 0)
        return tuple(NodeShare(node, used[node], there[node], 0) for node in used)


def _used(fd: int, offset: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the stretches of memory that exist, up to LOOK_BYTES in all: holes must not be filled by looking."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # a file position of our own
    left, at, end = LOOK_BYTES, offset, offset + size
    try:
        with contextlib.suppress(OSError):  # ENXIO: only holes are left
            while left > 0 and (at := os.lseek(own, at, os.SEEK_DATA)) < end:
                stop = min(end, at + left, os.lseek(own, at, os.SEEK_HOLE))
                yield at, stop - at
                left -= stop - at
                at = stop
    finally:
        os.close(own)
