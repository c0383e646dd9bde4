"""Writes recordings (service.recording) to a file that does not grow beyond bounds."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from service.recording import Header, Window, header_line, window_line


@dataclass
class Recorder:
    """An open recording. A file that has reached half of `most` bytes becomes OUT.1, in place of the one before, and a new one, a whole
    recording by itself, is begun: what is on disk is the latest part, of at most `most` bytes but for a line.

    Each line goes to the system at once, so that whoever reads meanwhile, or after a crash, has all but at most the last.
    """

    path: Path
    header: Header
    most: int
    windows: int = 0
    _size: int = 0
    _file: BinaryIO = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._begin()

    @property
    def former(self) -> Path:
        """Where the part before this one is, once there is one."""
        return former(self.path)

    def write(self, window: Window) -> None:
        """Adds a window. OSError if it can't be written."""
        line = window_line(window)
        if self._size + len(line) > self.most // 2 and self._has_windows:
            self._file.close()
            os.replace(self.path, self.former)
            self._begin()
        self._put(line)
        self.windows += 1

    def close(self) -> None:
        """No more of it."""
        self._file.close()

    def _begin(self) -> None:
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        self._size = 0
        self._put(header_line(self.header))
        self._has_windows = False

    def _put(self, line: bytes) -> None:
        self._has_windows = True
        left = memoryview(line)
        while left:
            left = left[self._file.write(left) :]
        self._size += len(line)


def former(path: Path) -> Path:
    """OUT.1 of OUT."""
    return path.with_name(path.name + ".1")
