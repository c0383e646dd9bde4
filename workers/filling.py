"""Copies a model's file into the memory of the nodes it is placed on, as fast as the machine lets.

Each node has threads of its own, which run on its CPUs. A piece is first given huge pages: one page of each is touched, which decides the
node, and MADV_COLLAPSE makes them huge while they are still empty, so that nothing is copied twice (measured: 8 GB/s, where filling first
and collapsing afterwards reached 0.5 to 0.8).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workers import numa
from workers.mapping import HUGE_PAGE, MADV_COLLAPSE, advise, mapped
from workers.placement import Extent
from workers.topology import Topology

PIECE = 8 << 20
"""Bytes a thread copies at a time; a multiple of the huge page size."""
THREADS = 4
"""For each node at the most: a few cores read and write as much as a node's memory gives."""


class FillError(RuntimeError):
    """The file can't be copied: it became shorter, or could not be read."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Of a node: bytes put there, those of them found there (None: nobody looked), and those on huge pages."""

    node: int
    bytes: int
    on_node: int | None
    huge_bytes: int


def pieces(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """(begin, end) of what is copied at a time: cut at multiples of PIECE, so that no huge page is cut that lies whole in an extent."""
    for extent in extents:
        at, end = extent.offset, extent.offset + extent.bytes
        while at < end:
            stop = min(end, at // PIECE * PIECE + PIECE)
            yield at, stop
            at = stop


class Filling:
    """One copy of a file into the descriptors `fds`, by node; -1 is no node in particular. degraded: what the kernel refused."""

    def __init__(self, file: int, size: int, fds: Mapping[int, int], extents: Sequence[Extent], topology: Topology) -> None:
        self.degraded: tuple[str, ...] = ()
        self._file = file
        self._size = size
        self._fds = fds
        self._extents = extents
        self._cpus = {node.id: node.cpus for node in topology.nodes}
        self._any_cpus = topology.cpus_allowed
        self._refused: dict[str, None] = {}
        self._error: BaseException | None = None
        self._huge = dict.fromkeys(fds, 0)
        self._lock = threading.Lock()

    def run(self) -> tuple[NodeShare, ...]:
        """Copies everything. FillError, OSError."""
        with contextlib.ExitStack() as stack:
            addresses = {node: stack.enter_context(mapped(fd, self._size, writable=True)) for node, fd in self._fds.items()}
            for node, address in addresses.items():
                if node >= 0:
                    self._refuse(numa.bind_memory(address, self._size, node))
            self._wait_for([thread for node in addresses for thread in self._threads(node, addresses[node])])
            if self._error is not None:
                raise self._error
            shares = tuple(self._share(node, address) for node, address in addresses.items())
        self.degraded = tuple(self._refused)
        return shares

    def _threads(self, node: int, address: int) -> list[threading.Thread]:
        todo = deque(pieces([extent for extent in self._extents if extent.node == node]))
        cpus = self._cpus.get(node) or ()
        count = min(THREADS, len(cpus or self._any_cpus), len(todo))
        return [threading.Thread(target=self._work, args=(node, address, cpus, todo), name=f"colibri-fill-{node}") for _ in range(count)]

    def _wait_for(self, threads: Sequence[threading.Thread]) -> None:
        """Runs them to their end, even if we are interrupted: they write to the mappings."""
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as interrupt:
            self._error = interrupt
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise

    def _work(self, node: int, address: int, cpus: Sequence[int], todo: deque[tuple[int, int]]) -> None:
        try:
            if cpus:
                self._refuse(numa.run_on(cpus))
            while self._error is None:
                try:
                    begin, end = todo.popleft()
                except IndexError:
                    return
                self._make_huge(node, address, begin, end)
                self._read(address, begin, end)
        except BaseException as error:  # of whatever kind: the thread that waits raises it
            self._error = error

    def _make_huge(self, node: int, address: int, begin: int, end: int) -> None:
        """Only huge pages that belong to the piece as a whole: in a partial one the rest would take memory for nothing."""
        first, last = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if last <= first:
            return
        for at in range(first, last, HUGE_PAGE):
            ctypes.c_char.from_address(address + at).value = b"\0"
        error = advise(address + first, last - first, MADV_COLLAPSE)
        if error:
            self._refuse(f"huge pages: {os.strerror(error)}")
            return
        with self._lock:
            self._huge[node] += last - first

    def _read(self, address: int, begin: int, end: int) -> None:
        at = begin
        while at < end:
            try:
                got = os.preadv(self._file, [(ctypes.c_char * (end - at)).from_address(address + at)], at)
            except OSError as refusal:
                raise FillError(f"the file can't be read at byte {at}: {refusal.strerror}") from refusal
            if got == 0:
                raise FillError(f"the file became shorter while it was read ({at} of {self._size} bytes)")
            at += got

    def _share(self, node: int, address: int) -> NodeShare:
        total = sum(extent.bytes for extent in self._extents if extent.node == node)
        if node < 0:
            return NodeShare(node, total, None, self._huge[node])
        use = numa.memory_use(address)
        found = None if use is None else min(total, use.bytes_on.get(node, 0))
        if found is None:
            self._refuse("where memory lies can't be read (/proc/self/numa_maps)")
        elif found < total:
            self._refuse(f"{total - found} of {total} bytes of NUMA node {node} lie on other nodes")
        return NodeShare(node, total, found, self._huge[node])

    def _refuse(self, text: str) -> None:
        if text:
            with self._lock:
                self._refused[text] = None
