"""A memory control group of our own below the one we are in, so that a process can be killed for want of memory and nobody else is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.fault.harness import wait_for
from workers.cgroup import memory_folders


class NoGroup(Exception):
    """No group can be made here; says why."""


class MemoryGroup:
    """An empty group. Processes are put in by what `enter` gives to a shell; limit() bounds all of them together."""

    def __init__(self, folder: Path, *, version: int) -> None:
        self.folder = folder
        self.version = version

    @property
    def enter(self) -> str:
        """Shell command by which a process joins."""
        return f"echo $$ > '{self.folder}/cgroup.procs'"

    def used(self) -> int:
        """Bytes charged to it."""
        return int((self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes")).read_text())

    def limit(self, size: int) -> None:
        """From now on no more bytes than this."""
        (self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")).write_text(str(size))

    def kills(self) -> int:
        """Processes of it that the kernel has killed for want of memory."""
        text = (self.folder / ("memory.events" if self.version == 2 else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """Makes a group and removes it once its processes have ended. NoGroup where the kernel or our rights do not allow it."""
    folders = memory_folders()
    if not folders:
        raise NoGroup("no memory control group is mounted here")
    version, own = folders[0]
    # Version 2 allows no group with processes to have groups below it that are limited: there it stands beside ours.
    folder = (own.parent if version == 2 else own) / f"{name}-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as refusal:
        raise NoGroup(f"{folder}: {refusal.strerror}") from refusal
    group = MemoryGroup(folder, version=version)
    try:
        try:
            group.limit(1 << 40)
        except OSError as refusal:
            raise NoGroup(f"{folder}: its memory can't be limited: {refusal.strerror}") from refusal
        yield group
    finally:
        wait_for(lambda: not (folder / "cgroup.procs").read_text(), seconds=5, what=f"{folder} is empty")
        folder.rmdir()
