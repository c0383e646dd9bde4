"""Trees of files that look like /proc and /sys of some machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


@dataclass
class Machine:
    """nodes: id -> (CPU list, memory in bytes, half of which is free). Everything else as in the files themselves."""

    nodes: Mapping[int, tuple[str, int]]
    allowed: str
    total: int = 64 * GIB
    available: int = 48 * GIB
    mems: str = ""
    siblings: Mapping[int, str] = field(default_factory=dict)
    cgroup: str = "0::/\n"
    mounts: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        mems = f"Mems_allowed_list:\t{self.mems}\n" if self.mems else ""
        put(root, "proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{self.allowed}\n{mems}")
        put(root, "proc/meminfo", f"MemTotal: {self.total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {self.available // 1024} kB\n")
        put(root, "proc/self/cgroup", self.cgroup)
        put(root, "proc/self/mountinfo", "".join(f"{line}\n" for line in self.mounts))
        for number, (cpus, memory) in self.nodes.items():
            folder = f"sys/devices/system/node/node{number}"
            put(root, f"{folder}/cpulist", cpus + "\n")
            free = f"Node {number} MemFree:  {memory // 2048} kB\n"
            put(root, f"{folder}/meminfo", f"Node {number} MemTotal:       {memory // 1024} kB\n{free}")
        for cpu, siblings in self.siblings.items():
            put(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings + "\n")
        for name, text in self.files.items():
            put(root, name, text)
        return root


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def mount_v1(controller: str, mount_root: str = "/") -> str:
    point = f"/sys/fs/cgroup/{controller}"
    return f"30 24 0:26 {mount_root} {point} rw,nosuid,relatime shared:10 - cgroup cgroup rw,{controller}"


def mount_v2(mount_root: str = "/") -> str:
    return f"30 24 0:26 {mount_root} /sys/fs/cgroup rw,nosuid,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
