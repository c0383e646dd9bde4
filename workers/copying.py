"""A copy of a model's file in memory while it is being made, so that what needs only the model's header goes on meanwhile.

Everybody maps the memory by descriptors that can only be read: such mappings do not keep it from being sealed once it is filled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from workers.filling import Filling, NodeShare
from workers.parts import seal
from workers.placement import Extent
from workers.topology import Topology


class Copying:
    """Memory files, one a node, that the extents of a file are copied to. start(), then complete() or stop()."""

    def __init__(self, path: str | os.PathLike[str], file: int, size: int, extents: Sequence[Extent], topology: Topology) -> None:
        """Makes the memory files. `file` stays the caller's. OSError."""
        self.fds: dict[int, int] = {}
        """By node: for reading only, and the caller's to close."""
        with contextlib.ExitStack() as ours:
            self._file = os.dup(file)
            ours.callback(os.close, self._file)
            self._writable: dict[int, int] = {}
            for node in dict.fromkeys(extent.node for extent in extents):
                name = f"colibri:{Path(path).name}"[:200] + (f":node{node}" if node >= 0 else "")
                self._writable[node] = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                ours.callback(os.close, self._writable[node])
                os.ftruncate(self._writable[node], size)
            with contextlib.ExitStack() as theirs:
                for node, fd in self._writable.items():
                    self.fds[node] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                    theirs.callback(os.close, self.fds[node])
                theirs.pop_all()
            self._ours = ours.pop_all()
        self._filling = Filling(self._file, size, self._writable, extents, topology)

    @property
    def pending(self) -> int:
        """Bytes that have not been copied yet."""
        return self._filling.pending

    def start(self, first: int) -> None:
        """Begins to copy; the bytes before `first` are there when it returns. FillError, OSError."""
        self._filling.start(first)

    def complete(self) -> tuple[tuple[NodeShare, ...], tuple[str, ...]]:
        """Waits until all is copied and seals it: nobody can change or resize it any more. Returns where it is, and what the machine
        refused. FillError, OSError."""
        try:
            shares = self._filling.wait()
            for fd in self._writable.values():
                seal(fd)
        finally:
            self.stop()
        return shares, self._filling.degraded

    def stop(self) -> None:
        """Calls off what still goes on and lets go of everything but `fds`. Harmless a second time."""
        self._filling.stop()
        self._ours.close()
