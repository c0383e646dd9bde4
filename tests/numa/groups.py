"""Control groups (version 2) inside a machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.numa.serving import until

TOP = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def group(name: str, **limits: str) -> Iterator[str]:
    """A group with limits such as cpuset_cpus="0-1" or memory_max="300M". Yields what a shell runs to get into it and start a program."""
    folder = TOP / name
    controllers = {limit.partition("_")[0] for limit in limits}
    (TOP / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in sorted(controllers)))
    folder.mkdir()
    try:
        for limit, value in limits.items():
            (folder / limit.replace("_", ".", 1)).write_text(value)
        yield f"echo $$ > {folder}/cgroup.procs; exec"
    finally:
        until(lambda: _removed(folder), f"nobody is left in {folder}")


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:  # a process is on its way out
        return False
    return True
