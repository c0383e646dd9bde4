"""The CPUs, nodes and memory this process may really use: sysfs, cut down by affinity, cpuset and cgroup limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workers.cgroup import read_cpu_quota, read_memory


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node: the CPUs of it we may use, and its memory (0: it has none, or we may not use it)."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Topology:
    """What may be used. Nodes without usable CPUs are listed too, as their memory may hold weights.

    cores groups the usable CPUs by physical core (SMT siblings together); empty: every CPU is a core.
    """

    nodes: tuple[Node, ...]
    cpus_allowed: tuple[int, ...]
    memory_limit_bytes: int
    cpu_quota: float | None = None
    memory_available_bytes: int = 0
    cores: tuple[tuple[int, ...], ...] = ()

    @property
    def usable_lanes(self) -> int:
        """Cores, or fewer if a quota gives less time than that."""
        count = len(self.cores) or len(self.cpus_allowed)
        return count if self.cpu_quota is None else max(1, min(count, int(self.cpu_quota)))

    def core_cpus(self, node: Node) -> tuple[int, ...]:
        """The first usable CPU of each physical core of a node."""
        if not self.cores:
            return node.cpus
        firsts = {core[0] for core in self.cores}
        return tuple(cpu for cpu in node.cpus if cpu in firsts)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """"0-3,8" -> (0, 1, 2, 3, 8). ValueError on anything else."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"not a list of CPUs or nodes: {text.strip()!r}")
        found.update(range(int(low), int(high if dash else low) + 1))
    return tuple(sorted(found))


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name, of /proc/meminfo or a node's meminfo."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name.split()[-1]] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def read_topology(root: str | Path = "/") -> Topology:
    """Reads /proc and /sys below root. OSError if even /proc/self/status or /proc/meminfo is missing."""
    base = Path(root)
    status = _status(base)
    memory = parse_meminfo((base / "proc/meminfo").read_text())
    cgroup = read_memory(base)
    total = memory["MemTotal"]
    available = memory.get("MemAvailable", memory.get("MemFree", 0))
    allowed = parse_cpu_list(status["Cpus_allowed_list"])
    mems = set(parse_cpu_list(status.get("Mems_allowed_list", "")))
    return Topology(
        nodes=_nodes(base, allowed, mems, total),
        cpus_allowed=allowed,
        memory_limit_bytes=total if cgroup.limit_bytes is None else min(total, cgroup.limit_bytes),
        cpu_quota=read_cpu_quota(base),
        memory_available_bytes=available if cgroup.available_bytes is None else min(available, cgroup.available_bytes),
        cores=_cores(base, allowed),
    )


def _status(base: Path) -> dict[str, str]:
    lines = (base / "proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _nodes(base: Path, allowed: Iterable[int], mems: set[int], total: int) -> tuple[Node, ...]:
    usable = set(allowed)
    folders = sorted((base / "sys/devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    nodes = []
    for folder in folders:
        number = int(folder.name[4:])
        cpus = tuple(cpu for cpu in parse_cpu_list(_text(folder / "cpulist")) if cpu in usable)
        # One node holds all memory whatever its meminfo says (hot-plugged memory is not always counted there).
        memory = total if len(folders) == 1 else parse_meminfo(_text(folder / "meminfo")).get("MemTotal", 0)
        nodes.append(Node(number, cpus, memory if not mems or number in mems else 0))
    seen = {cpu for node in nodes for cpu in node.cpus}
    if usable - seen:  # no NUMA in the kernel, or sysfs is hidden from us: one node is all there is to know
        return (Node(0, tuple(sorted(usable)), total),)
    return tuple(nodes)


def _cores(base: Path, allowed: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    usable = set(allowed)
    cores = set()
    for cpu in usable:
        siblings = parse_cpu_list(_text(base / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores.add(tuple(sorted(usable & {cpu, *siblings})))
    return tuple(sorted(cores))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
