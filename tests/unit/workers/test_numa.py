"""What the kernel says of NUMA memory, and how refusals are told."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from workers import numa
from workers.mapping import HUGE_PAGE, mapped
from workers.numa import MemoryUse, parse_numa_maps_line


@pytest.mark.parametrize(
    ("line", "use"),
    [
        (
            "7f0000200000 bind:1 file=/memfd:colibri:m.colibri:node1\\040(deleted) dirty=512 active=0 N1=512 kernelpagesize_kB=4",
            MemoryUse("bind:1", {1: 512 * 4096}),
        ),
        ("00400000 default file=/bin/x mapped=3 N0=2 N10=1 kernelpagesize_kB=4", MemoryUse("default", {0: 8192, 10: 4096})),
        ("7f00 prefer:0 huge dirty=2 N0=2 kernelpagesize_kB=2048", MemoryUse("prefer:0", {0: 2 * HUGE_PAGE})),
        ("7f00 default", MemoryUse("default", {})),
    ],
)
def test_a_line_of_numa_maps(line: str, use: MemoryUse) -> None:
    assert parse_numa_maps_line(line) == use


def test_the_mapping_that_is_asked_for_is_found(tmp_path: Path) -> None:
    text = "7f0000200000 default N0=1\n7f0000400000 bind:1 N1=2 kernelpagesize_kB=4\n"
    (tmp_path / "numa_maps").write_text(text)
    assert numa.memory_use(0x7F0000400000, str(tmp_path / "numa_maps")) == MemoryUse("bind:1", {1: 8192})
    assert numa.memory_use(0x7F0000300000, str(tmp_path / "numa_maps")) is None
    assert numa.memory_use(0, str(tmp_path / "none")) is None


def test_touched_pages_of_a_mapping_are_counted() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 20)
    with mapped(fd, 1 << 20, writable=True) as address:
        assert address % HUGE_PAGE == 0
        os.pwrite(fd, bytes(1 << 20), 0)
        with mmap.mmap(fd, 0) as other:
            other.read()
        before = numa.memory_use(address)
    assert before is not None, "this kernel shows no numa_maps"
    assert before.bytes_on == {}, "what another mapping touched does not count"
    os.close(fd)


def test_refusals_are_told_with_the_node() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    with mapped(fd, 4096, writable=True) as address:
        assert numa.bind_memory(address, 4096, 1000).startswith("mbind to NUMA node 1000: ")
        assert numa.bind_memory(address, 4096, 1024) == "mbind: node 1024 is out of range"
    os.close(fd)
