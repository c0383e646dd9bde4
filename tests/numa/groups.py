"""Control groups (version 2) inside a machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.numa.serving import until

TOP = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def group(name: str, **limits: str) -> Iterator[Path]:
    """A group with limits such as cpuset_cpus="0-1" or memory_max="300M". Yields its folder."""
    folder = TOP / name
    controllers = {limit.partition("_")[0] for limit in limits}
    (TOP / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in sorted(controllers)))
    folder.mkdir()
    try:
        for limit, value in limits.items():
            (folder / limit.replace("_", ".", 1)).write_text(value)
        yield folder
    finally:
        until(lambda: _removed(folder), f"nobody is left in {folder}")


def entering(folder: Path) -> str:
    """What a shell runs to get into a group and start a program."""
    return f"echo $$ > {folder}/cgroup.procs; exec"


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """This process is in a group meanwhile."""
    cpus = os.sched_getaffinity(0)
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (TOP / "cgroup.procs").write_text(str(os.getpid()))
        os.sched_setaffinity(0, cpus)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:  # a process is on its way out
        return False
    return True
