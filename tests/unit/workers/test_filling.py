"""Copies into memory: every byte, in pieces, and what stops them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from workers.filling import PIECE, FillError, Filling, pieces
from workers.mapping import HUGE_PAGE
from workers.placement import Extent
from workers.topology import Topology, read_topology

EXTENTS = st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=6)


@given(EXTENTS)
def test_pieces_cover_the_extents_and_cut_no_huge_page(sizes: list[int]) -> None:
    extents, at = [], 0
    for size in sizes:
        extents.append(Extent(0, at, size))
        at += size + 4096
    cut = list(pieces(extents))
    assert sum(end - begin for begin, end in cut) == sum(sizes)
    assert all(0 < end - begin <= PIECE for begin, end in cut)
    ends = {extent.offset + extent.bytes for extent in extents}
    assert all(end in ends or end % HUGE_PAGE == 0 for _, end in cut)


@contextlib.contextmanager
def memory(nodes: list[int], size: int) -> Iterator[dict[int, int]]:
    fds = {node: os.memfd_create(f"test{node}") for node in nodes}
    for fd in fds.values():
        os.ftruncate(fd, size)
    yield fds
    for fd in fds.values():
        os.close(fd)


@pytest.fixture(scope="module")
def here() -> Topology:
    return read_topology()


def test_each_extent_goes_to_its_descriptor_and_holes_stay_holes(tmp_path: Path, here: Topology) -> None:
    data = os.urandom(3 * HUGE_PAGE + 12345)
    path = tmp_path / "file"
    path.write_bytes(data)
    cuts = [0, 4096, HUGE_PAGE, 2 * HUGE_PAGE + 8192, len(data)]
    extents = [Extent(i % 2, begin, end - begin) for i, (begin, end) in enumerate(itertools.pairwise(cuts))]
    with path.open("rb") as file, memory([0, 1], len(data)) as fds:
        shares = Filling(file.fileno(), len(data), fds, extents, here).run()
        for extent in extents:
            assert os.pread(fds[extent.node], extent.bytes, extent.offset) == data[extent.offset : extent.offset + extent.bytes]
        assert [share.bytes for share in shares] == [sum(e.bytes for e in extents if e.node == node) for node in (0, 1)]
        for node, share in enumerate(shares):
            assert os.fstat(fds[node]).st_blocks * 512 <= share.bytes + 2 * 4096


def test_a_file_that_is_shorter_than_it_was_is_an_error(tmp_path: Path, here: Topology) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    with (
        path.open("rb") as file,
        memory([-1], 5000) as fds,
        pytest.raises(FillError, match="the file became shorter while it was read: it ends at byte 1000"),
    ):
        Filling(file.fileno(), 5000, fds, [Extent(-1, 0, 5000)], here).run()


def test_a_file_that_can_not_be_read_is_an_error(tmp_path: Path, here: Topology) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with memory([-1], 5000) as fds, pytest.raises(FillError, match="the file can't be read at byte 0: Is a directory"):
        Filling(folder, 5000, fds, [Extent(-1, 0, 5000)], here).run()
    os.close(folder)
