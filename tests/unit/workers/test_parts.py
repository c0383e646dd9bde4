"""The table by which workers learn of a model's parts."""

from __future__ import annotations

import fcntl
import os

import pytest

from engine_c import Part
from workers.parts import SEALS, read_table, write_table


def test_a_table_says_what_was_written_and_can_not_be_changed() -> None:
    parts = (Part(7, -1, 0, 4096), Part(8, 3, 4096, 1 << 40))
    fd = write_table(parts)
    assert read_table(fd) == parts
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


@pytest.mark.parametrize("size", [0, 23, 25])
def test_what_is_no_table_is_refused(size: int) -> None:
    fd = os.memfd_create("test")
    os.write(fd, bytes(size))
    with pytest.raises(ValueError, match=f"a table of {size} bytes lists no parts"):
        read_table(fd)
    os.close(fd)
