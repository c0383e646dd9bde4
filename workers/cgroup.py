"""Limits and counters of the control groups this process is in, version 1 and 2, the stricter of all levels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED_V1 = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of the page size, just below 2**63."""


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """What the groups say about memory; None where no level limits or counts."""

    limit_bytes: int | None
    available_bytes: int | None
    oom_kills: int | None


def read_memory(root: str | Path = "/") -> CgroupMemory:
    """Limit, what is left below it (page cache that can go counts as free) and the OOM killer's kills in our own group so far."""
    limits, left, kills = [], [], []
    for version, folder in _levels(Path(root), "memory"):
        limit = _number(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        events = _keyed(folder / ("memory.events" if version == 2 else "memory.oom_control"))
        if "oom_kill" in events:
            kills.append(events["oom_kill"])
        if limit is None or limit >= UNLIMITED_V1:
            continue
        limits.append(limit)
        used = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if used is not None:
            stat = _keyed(folder / "memory.stat")
            left.append(max(0, limit - used + stat.get("inactive_file" if version == 2 else "total_inactive_file", 0)))
    return CgroupMemory(min(limits, default=None), min(left, default=None), kills[0] if kills else None)


def memory_folders(root: str | Path = "/") -> list[tuple[int, Path]]:
    """(version, folder) of the groups whose memory limits bind this process: its own first, then those above."""
    return list(_levels(Path(root), "memory"))


class OomWatch:
    """Tells whether an end by SIGKILL was the OOM killer's doing: each of its kills accounts for one such end."""

    def __init__(self, root: str | Path = "/") -> None:
        self._root = root
        self._told = self._kills()

    def took_one(self) -> bool:
        """Whether it has killed once more than was told. Of several processes of the group it may have been another one."""
        found = self._kills() > self._told
        self._told += found
        return found

    def _kills(self) -> int:
        """Our group's; outside any group the machine's, which is all there is."""
        kills = read_memory(self._root).oom_kills
        return _keyed(Path(self._root) / "proc/vmstat").get("oom_kill", 0) if kills is None else kills


def read_cpu_quota(root: str | Path = "/") -> float | None:
    """CPUs' worth of time the groups allow, None if they do not limit it."""
    quotas = []
    for version, folder in _levels(Path(root), "cpu"):
        if version == 2:
            words = _text(folder / "cpu.max").split()
            quota, period = (words[0], words[1]) if len(words) == 2 else ("max", "0")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _levels(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of our group and its ancestors as far as they are mounted."""
    paths = _group_paths(root)
    for version, mount_root, mount_point, controllers in _mounts(root):
        key = "" if version == 2 else controller
        if key not in paths or (version == 1 and controller not in controllers):
            continue
        # In a container the mount may show only our part of the tree, and the path be the host's or our namespace's.
        relative = paths[key].removeprefix(mount_root.rstrip("/")).strip("/")
        top = root / mount_point.lstrip("/")
        folder = top / relative
        if ".." in relative or not folder.is_dir():
            folder = top
        while True:
            yield version, folder
            if folder == top:
                break
            folder = folder.parent


def _group_paths(root: Path) -> dict[str, str]:
    """Controller -> path of our group; "" for version 2."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mounts(root: Path) -> Iterator[tuple[int, str, str, frozenset[str]]]:
    """(version, root within the hierarchy, mount point, controllers) of each cgroup mount."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        words = line.split()
        if "-" not in words[5:]:
            continue
        dash = words.index("-", 5)
        kind, options = words[dash + 1], words[-1].split(",")
        if kind == "cgroup2":
            yield 2, words[3], words[4], frozenset()
        elif kind == "cgroup":
            yield 1, words[3], words[4], frozenset(options)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _keyed(path: Path) -> dict[str, int]:
    lines = [line.split() for line in _text(path).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
