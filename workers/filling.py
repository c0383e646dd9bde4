"""Copies a model's file into the memory of the nodes it is placed on, as fast as the machine lets.

Each node has threads of its own, which run on its CPUs. A piece is first given huge pages: one page of each is touched, which decides the
node, and MADV_COLLAPSE makes them huge while they are still empty, so that nothing is copied twice (measured: 8 to 10 GB/s, where filling
first and collapsing afterwards reached 0.5 to 0.8). All of that is one call of the engine's a piece (colibri_fill), without Python's lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine_c import EngineError
from engine_c.fill import fill
from workers import numa
from workers.mapping import HUGE_PAGE, mapped
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
    """One copy of a file into the descriptors `fds`, by node; -1 is no node in particular. degraded: what the kernel refused.

    run() is all of it; or start(), then wait() or stop(), during which other threads do what they like.
    """

    def __init__(self, file: int, size: int, fds: Mapping[int, int], extents: Sequence[Extent], topology: Topology) -> None:
        self.degraded: tuple[str, ...] = ()
        self.pending = sum(extent.bytes for extent in extents)
        """Bytes that have not been copied yet."""
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
        self._mappings = contextlib.ExitStack()
        self._addresses: dict[int, int] = {}
        self._threads: list[threading.Thread] = []

    def run(self) -> tuple[NodeShare, ...]:
        """Copies everything. FillError, OSError."""
        self.start()
        return self.wait()

    def start(self, first: int = 0) -> None:
        """Begins; the bytes before `first` are there when it returns. FillError, OSError: nothing goes on then."""
        try:
            for node, fd in self._fds.items():
                self._addresses[node] = self._mappings.enter_context(mapped(fd, self._size, writable=True))
                if node >= 0:
                    self._refuse(numa.bind_memory(self._addresses[node], self._size, node))
            for node in self._addresses:
                todo = deque(pieces([extent for extent in self._extents if extent.node == node]))
                while todo and todo[0][0] < first:
                    self._fill(node, *todo.popleft())
                self._threads += self._workers(node, todo)
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.stop()
            raise

    def wait(self) -> tuple[NodeShare, ...]:
        """Returns when everything is copied and nothing is mapped any more. FillError, OSError."""
        try:
            for thread in self._threads:
                thread.join()
            if self._error is not None:
                raise self._error
            shares = tuple(self._share(node, address) for node, address in self._addresses.items())
        finally:
            self.stop()
        self.degraded = tuple(self._refused)
        return shares

    def stop(self) -> None:
        """Ends what still goes on: the threads write to the mappings, which are then gone. Harmless a second time."""
        self._error = self._error or FillError("it was called off")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._mappings.close()

    def _workers(self, node: int, todo: deque[tuple[int, int]]) -> list[threading.Thread]:
        cpus = self._cpus.get(node) or ()
        count = min(THREADS, len(cpus or self._any_cpus), len(todo))
        return [threading.Thread(target=self._work, args=(node, cpus, todo), name=f"colibri-fill-{node}") for _ in range(count)]

    def _work(self, node: int, cpus: Sequence[int], todo: deque[tuple[int, int]]) -> None:
        try:
            if cpus:
                self._refuse(numa.run_on(cpus))
            while self._error is None:
                try:
                    piece = todo.popleft()
                except IndexError:
                    return
                self._fill(node, *piece)
        except BaseException as error:  # of whatever kind: the thread that waits raises it
            self._error = error

    def _fill(self, node: int, begin: int, end: int) -> None:
        try:
            refusal = fill(self._file, self._addresses[node], begin, end)
        except EngineError as error:
            raise FillError(str(error)) from error
        if refusal:
            self._refuse(f"huge pages: {os.strerror(refusal)}")
        with self._lock:
            self.pending -= end - begin
            if not refusal:
                self._huge[node] += max(0, end // HUGE_PAGE - -(-begin // HUGE_PAGE)) * HUGE_PAGE

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
