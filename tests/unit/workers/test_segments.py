"""Model images: the file itself, or a sealed copy."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

import pytest

from workers.filling import PIECE
from workers.layout import header_end
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
        with open(f"/proc/self/fd/{image.fds[0]}", "r+b") as anew:  # not only because the descriptor at hand is for reading
            for fd in (image.fds[0], anew.fileno()):
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, image.bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError) as refusal:
                os.ftruncate(anew.fileno(), 10)
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


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Several pieces of a copy, that begin as a container whose descriptor is 36 bytes long."""
    path = tmp_path / "large.colibri"
    header = struct.pack("<8sIIQQQII", b"COLIBRI\0", 1, 0x01020304, 64, 36, 3 * PIECE, 0, 0).ljust(64, b"\0")
    path.write_bytes((header + b"d" * 36).ljust(4096, b"\1") + os.urandom(4096) * (3 * PIECE // 4096 - 1))
    return path


def test_a_copy_in_the_making_has_the_header_and_can_only_be_read(large: Path) -> None:
    with open_image(large, mode="memfd", complete=False) as image:
        assert os.pread(image.fds[0], 100, 0) == large.read_bytes()[:100]
        with pytest.raises(OSError) as refusal:
            os.write(image.fds[0], b"x")
        assert refusal.value.errno == errno.EBADF
        with mmap.mmap(image.fds[0], image.bytes, mmap.MAP_SHARED, mmap.PROT_READ) as view:
            image.complete()  # what is mapped by then does not keep it from being sealed
            assert view[:] == large.read_bytes()
        assert image.pending == 0
        assert fcntl.fcntl(image.fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
        assert [share.bytes for share in image.report.shares] == [image.bytes]


def test_closing_calls_a_copy_off(large: Path) -> None:
    before = os.listdir("/proc/self/fd")
    image = open_image(large, mode="memfd", complete=False)
    assert 0 <= image.pending <= image.bytes - PIECE
    image.close()
    image.close()
    assert os.listdir("/proc/self/fd") == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("colibri-fill")]


@pytest.mark.parametrize(("offset", "length", "end"), [(64, 36, 100), (64, 1 << 40, 3 * PIECE), (1 << 40, 36, 3 * PIECE)])
def test_the_header_ends_where_it_says_or_with_the_file(large: Path, offset: int, length: int, end: int) -> None:
    with large.open("r+b") as file:
        file.seek(16)
        file.write(struct.pack("<QQ", offset, length))
        file.flush()
        assert header_end(file.fileno()) == end
        file.seek(0)
        file.write(b"X")
        file.flush()
        assert header_end(file.fileno()) == 3 * PIECE
