"""Temporary files beside their target: each is locked while its process lives, and what a killed process left is removed.

The kernel drops the lock (flock) with the process, whatever ends it; a process id in the name could have a new owner by then."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path


def temporary_name(target: Path) -> Path:
    """A name beside `target` that nothing has."""
    return target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"


def create_locked(path: Path) -> int:
    """Makes the file; a descriptor open for reading and writing, which holds the lock. Raises OSError."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):  # a file system without locks; there remove_stale() leaves everything
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # remove_stale() of another process came between file and lock


def remove_stale(target: Path) -> None:
    """Removes the temporary files of `target` whose process is gone. What cannot be removed stays."""
    name = re.compile(rf"\.{re.escape(target.name)}\.\d+\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        found = [entry.path for entry in entries if name.fullmatch(entry.name)]
        for path in found:
            _remove_unlocked(path)


def _remove_unlocked(path: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(fd)
