"""The CPUs, nodes and memory this process may really use: sysfs, cut down by affinity, cpuset and cgroup limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.cgroup import read_cpu_quota, read_memory


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node: the CPUs of it we may use, its memory (0: it has none, or we may not use it) and what of that is free or can be freed at
    once (None: not known)."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """What may be used. Nodes without usable CPUs are listed too, as their memory may hold weights.

    cores groups the usable CPUs by physical core (SMT siblings together); empty: every CPU is a core. distances[i][j] is the kernel's from
    nodes[i] to nodes[j], 10 being the node itself; empty: not known. l3 groups the usable CPUs that share a last level cache. offline are
    CPUs that the machine has and that are switched off.
    """

    nodes: tuple[Node, ...]
    cpus_allowed: tuple[int, ...]
    memory_limit_bytes: int
    cpu_quota: float | None = None
    memory_available_bytes: int = 0
    cores: tuple[tuple[int, ...], ...] = ()
    distances: tuple[tuple[int, ...], ...] = ()
    l3: tuple[tuple[int, ...], ...] = ()
    offline: tuple[int, ...] = ()

    @property
    def usable_lanes(self) -> int:
        """Cores, or fewer if a quota gives less time than that."""
        return self.lanes_for(smt=False)

    @property
    def has_siblings(self) -> bool:
        """Whether two usable CPUs share a core."""
        return any(len(core) > 1 for core in self.cores)

    @property
    def memory_nodes(self) -> tuple[Node, ...]:
        """Nodes whose memory may be used."""
        return tuple(node for node in self.nodes if node.memory_bytes > 0)

    def lanes_for(self, *, smt: bool) -> int:
        """Lanes that can compute at once: one a core, or with smt one a CPU, or fewer if a quota gives less time than that."""
        count = len(self.cpus_allowed) if smt else len(self.cores) or len(self.cpus_allowed)
        return count if self.cpu_quota is None else max(1, min(count, int(self.cpu_quota)))

    def core_cpus(self, node: Node, *, smt: bool = False) -> tuple[int, ...]:
        """The first usable CPU of each physical core of a node; with smt then the second of each, and so on."""
        if not self.cores:
            return node.cpus
        rank = {cpu: place for core in self.cores for place, cpu in enumerate(core)}
        return tuple(sorted((cpu for cpu in node.cpus if smt or rank.get(cpu, 0) == 0), key=lambda cpu: (rank.get(cpu, 0), cpu)))

    def distance(self, a: int, b: int) -> int:
        """The kernel's distance of two nodes; where it says nothing, 10 to itself and 20 to another."""
        ids = [node.id for node in self.nodes]
        if a in ids and b in ids and self.distances:
            return self.distances[ids.index(a)][ids.index(b)]
        return 10 if a == b else 20

    def nearest_memory(self, node: int) -> int | None:
        """The node itself if it has memory, else the nearest that has; None if none has. Of equally near ones the first."""
        return min(((self.distance(node, other.id), other.id != node, other.id) for other in self.memory_nodes), default=(0, True, None))[2]


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


_allowance: tuple[int, ...] = ()
"""CPUs this process might use before its threads were put where they belong (workers.confine)."""


def keep_allowance() -> tuple[int, ...]:
    """The CPUs this process may use as it was given them. From now on read_topology takes these for what is allowed, whatever CPUs this
    process keeps its threads on."""
    global _allowance
    _allowance = _allowance or parse_cpu_list(_status(Path("/"))["Cpus_allowed_list"])
    return _allowance


def read_topology(root: str | Path = "/") -> Topology:
    """Reads /proc and /sys below root. OSError if even /proc/self/status or /proc/meminfo is missing."""
    base = Path(root)
    status = _status(base)
    memory = parse_meminfo((base / "proc/meminfo").read_text())
    cgroup = read_memory(base)
    total = memory["MemTotal"]
    available = memory.get("MemAvailable", memory.get("MemFree", 0))
    available = available if cgroup.available_bytes is None else min(available, cgroup.available_bytes)
    allowed = _allowance if _allowance and base == Path("/") else parse_cpu_list(status["Cpus_allowed_list"])
    mems = set(parse_cpu_list(status.get("Mems_allowed_list", "")))
    nodes = _nodes(base, allowed, mems, total)
    return Topology(
        nodes=nodes,
        cpus_allowed=allowed,
        memory_limit_bytes=total if cgroup.limit_bytes is None else min(total, cgroup.limit_bytes),
        cpu_quota=read_cpu_quota(base),
        memory_available_bytes=available,
        cores=_groups(base, allowed, "topology/thread_siblings_list"),
        distances=_distances(base, nodes),
        l3=_groups(base, allowed, "cache/index3/shared_cpu_list"),
        offline=_cpu_list(base / "sys/devices/system/cpu/offline"),
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
        cpus = tuple(cpu for cpu in _cpu_list(folder / "cpulist") if cpu in usable)
        memory = parse_meminfo(_text(folder / "meminfo"))
        # One node holds all memory whatever its meminfo says (hot-plugged memory is not always counted there).
        size = total if len(folders) == 1 else memory.get("MemTotal", 0)
        usable_here = not mems or number in mems
        nodes.append(Node(number, cpus, size if usable_here else 0, _free(memory) if usable_here and len(folders) > 1 else None))
    seen = {cpu for node in nodes for cpu in node.cpus}
    if usable - seen:  # no NUMA in the kernel, or sysfs is hidden from us: one node is all there is to know
        return (Node(0, tuple(sorted(usable)), total),)
    return tuple(nodes)


def _free(memory: Mapping[str, int]) -> int | None:
    """Bytes of a node that are free, or page cache and kernel caches that can go."""
    if "MemFree" not in memory:
        return None
    return memory["MemFree"] + memory.get("Inactive(file)", 0) + memory.get("Active(file)", 0) // 2 + memory.get("SReclaimable", 0) // 2


def _distances(base: Path, nodes: Sequence[Node]) -> tuple[tuple[int, ...], ...]:
    """Empty unless every node has a distance to every other. The files' columns are the online nodes by number, as our nodes are."""
    rows = [_text(base / f"sys/devices/system/node/node{node.id}/distance").split() for node in nodes]
    if not all(len(row) == len(nodes) and all(word.isdigit() for word in row) for row in rows):
        return ()
    return tuple(tuple(map(int, row)) for row in rows)


def _groups(base: Path, allowed: Iterable[int], name: str) -> tuple[tuple[int, ...], ...]:
    """The usable CPUs grouped by what a file of each of them lists."""
    usable = set(allowed)
    groups = {tuple(sorted(usable & {cpu, *_cpu_list(base / f"sys/devices/system/cpu/cpu{cpu}/{name}")})) for cpu in usable}
    return tuple(sorted(groups))


def _cpu_list(path: Path) -> tuple[int, ...]:
    """() if the file is missing or says nothing sensible."""
    try:
        return parse_cpu_list(_text(path))
    except ValueError:
        return ()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
