"""Model images: the file itself, or a sealed copy."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from workers.mapping import HUGE_PAGE
from workers.segments import SegmentError, open_image


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two huge pages and a bit."""
    path = tmp_path / "model.colibri"
    path.write_bytes(os.urandom(4096) * (2 * HUGE_PAGE // 4096) + b"the end")
    return path


def test_map_is_the_file_itself(file: Path) -> None:
    with open_image(file) as image:
        assert (image.mode, image.bytes) == ("map", file.stat().st_size)
        assert os.fstat(image.fds[0]).st_ino == file.stat().st_ino


def test_memfd_is_an_equal_copy_of_the_same_length(file: Path) -> None:
    with open_image(file, mode="memfd") as image:
        assert os.fstat(image.fds[0]).st_size == image.bytes == file.stat().st_size
        assert os.pread(image.fds[0], image.bytes, 0) == file.read_bytes()
        assert 0 <= image.huge_bytes <= image.bytes


def test_memfd_can_be_mapped_but_never_changed(file: Path) -> None:
    with open_image(file, mode="memfd") as image:
        seals = fcntl.fcntl(image.fds[0], fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        with mmap.mmap(image.fds[0], image.bytes, mmap.MAP_SHARED, mmap.PROT_READ) as view:
            assert view[-7:] == b"the end"
        with pytest.raises(PermissionError):
            mmap.mmap(image.fds[0], image.bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError) as refusal:
            os.ftruncate(image.fds[0], 10)
        assert refusal.value.errno == errno.EPERM


def test_auto_copies_only_what_leaves_half_of_the_memory_free(file: Path) -> None:
    needed = 2 * file.stat().st_size + (64 << 20)
    for available, mode in ((needed, "memfd"), (needed - 1, "map")):
        with open_image(file, mode="auto", available=available) as image:
            assert image.mode == mode


def test_a_copy_that_does_not_fit_is_refused_with_what_it_needs_and_what_there_is(file: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SegmentError, match=r"needs 68 MiB, 20 MiB is free; use load mode map"):
        open_image(file, mode="memfd", available=20 << 20)
    assert os.listdir("/proc/self/fd") == before


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match=r"none\.colibri: No such file"):
        open_image(tmp_path / "none.colibri")
    empty = tmp_path / "empty.colibri"
    empty.touch()
    with pytest.raises(SegmentError, match=r"empty\.colibri: the file is empty"):
        open_image(empty, mode="memfd")


def test_closing_twice_is_harmless(file: Path) -> None:
    image = open_image(file)
    image.close()
    image.close()
    assert image.fds == ()
