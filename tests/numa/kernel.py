"""What the kernel says of processes: where their threads may run, whose memory they ask for, where pages lie."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workers.mapping import PAGE, mapped
from workers.topology import parse_cpu_list


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread, the CPUs it may run on and how much it has run (seconds)."""

    id: int
    name: str
    cpus: frozenset[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Mapping:
    """A line of numa_maps: the policy there and the pages of 4 KiB on each node that this process has in its page tables."""

    policy: str
    what: str
    pages: dict[int, int]


def threads(pid: int) -> list[Thread]:
    """All threads of a process, the main one first."""
    found = []
    for folder in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda folder: int(folder.name)):
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        run = int((folder / "schedstat").read_text().split()[0])
        cpus = frozenset(parse_cpu_list(status["Cpus_allowed_list"]))
        found.append(Thread(int(folder.name), status["Name"].strip(), cpus, run / 1e9))
    return found


def share(pages: dict[int, int], node: int) -> float:
    """Of pages by node, those on one."""
    return pages.get(node, 0) / max(1, sum(pages.values()))


def node_of_cpu() -> dict[int, int]:
    """The node of every CPU."""
    folders = Path("/sys/devices/system/node").glob("node[0-9]*")
    return {cpu: int(folder.name[4:]) for folder in folders for cpu in parse_cpu_list((folder / "cpulist").read_text())}


def mappings(pid: int | str = "self") -> dict[int, Mapping]:
    """numa_maps of a process by address."""
    found = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        address, policy, *words = line.split()
        scale = next((int(word[18:]) for word in words if word.startswith("kernelpagesize_kB=")), 4) // 4
        pages = {int(match[1]): int(match[2]) * scale for word in words if (match := re.fullmatch(r"N(\d+)=(\d+)", word))}
        what = next((word for word in words if word.startswith(("file=", "heap", "stack"))), "")
        found[int(address, 16)] = Mapping(policy, what, pages)
    return found


def shared_memory() -> int:
    """Bytes of memory in memfds and /dev/shm, all processes together."""
    match = re.search(r"^Shmem: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def pages_of(fd: int, extents: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Pages of (offset, bytes) stretches of a memory file on each node; offsets are multiples of a page. Each is mapped for itself: pages
    around the touched ones come into the page tables with them."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for offset, count in extents:
            address = stack.enter_context(mapped(fd, count, writable=False, offset=offset))
            for at in range(address, address + count, PAGE):
                ctypes.c_char.from_address(at).value  # noqa: B018 - reading is the point
            addresses.append(address)
        found = mappings()
        total: Counter[int] = Counter()
        for address in addresses:
            total.update(found[address].pages)
        return dict(total)
