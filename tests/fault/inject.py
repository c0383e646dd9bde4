"""Makes a process do a system call of our choice, as a debugger would: how it comes to call _exit(0) or to ask for memory, unasked.

No code of the process takes part: it is seized by ptrace, its registers are set, it is let go. Its parent sees no stop.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PTRACE_DETACH = 17
PTRACE_GETREGSET = 0x4204
PTRACE_SETREGSET = 0x4205
PTRACE_SEIZE = 0x4206
PTRACE_INTERRUPT = 0x4207
NT_PRSTATUS = 1
WAIT_ALL = 0x40000000  # __WALL


@dataclass(frozen=True, slots=True)
class Machine:
    """How a system call is made: registers by their place among the 64-bit words of NT_PRSTATUS, and the instruction."""

    words: int
    pc: int
    number: int
    arguments: tuple[int, ...]
    instruction: bytes
    interrupted: int | None  # where a call that was interrupted is remembered for its restart; -1 forgets it
    exit_group: int
    mmap: int


MACHINES = {
    "x86_64": Machine(27, 16, 10, (14, 13, 12, 7, 9, 8), b"\x0f\x05", 15, exit_group=231, mmap=9),
    "aarch64": Machine(34, 32, 8, (0, 1, 2, 3, 4, 5), b"\x01\x00\x00\xd4", None, exit_group=94, mmap=222),
}


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int = 0, data: object = None) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def machine() -> Machine:
    """This machine's; KeyError if it is not known here."""
    return MACHINES[os.uname().machine]


def inject(pid: int, number: int, arguments: Sequence[int]) -> bool:
    """Makes the main thread of a process, which must wait in a system call, do this one. False if it ended or did not wait in a call."""
    try:
        _ptrace(PTRACE_SEIZE, pid)
    except ProcessLookupError:
        return False
    try:
        _ptrace(PTRACE_INTERRUPT, pid)
        os.waitpid(pid, WAIT_ALL)
        done = _redirect(pid, number, arguments)
        _ptrace(PTRACE_DETACH, pid)
    except ProcessLookupError:  # killed meanwhile: its parent hears of that once we have
        os.waitpid(pid, WAIT_ALL)
        return False
    return done


def _redirect(pid: int, number: int, arguments: Sequence[int]) -> bool:
    """Sets the registers of a seized process so that it does the call next; False if it is not at a call."""
    kind = machine()
    words = (ctypes.c_uint64 * kind.words)()
    vector = _Vector(ctypes.addressof(words), ctypes.sizeof(words))
    _ptrace(PTRACE_GETREGSET, pid, NT_PRSTATUS, ctypes.byref(vector))
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        size = len(kind.instruction)
        memory.seek(words[kind.pc] - size)
        before, here = memory.read(size), memory.read(size)
    if kind.instruction not in (before, here):
        return False
    if before == kind.instruction:
        words[kind.pc] -= size
    words[kind.number] = number
    for register, value in zip(kind.arguments, arguments, strict=False):
        words[register] = value % 2**64
    if kind.interrupted is not None:
        words[kind.interrupted] = 2**64 - 1
    _ptrace(PTRACE_SETREGSET, pid, NT_PRSTATUS, ctypes.byref(vector))
    return True


def exit_quietly(pid: int) -> bool:
    """_exit(0) of a process that nobody asked to end."""
    return inject(pid, machine().exit_group, [0])


def take_memory(pid: int, size: int) -> bool:
    """Makes a process ask for size bytes and touch them all, in one call (mmap, private, MAP_POPULATE)."""
    private, anonymous, no_reserve, populate = 0x02, 0x20, 0x4000, 0x8000
    return inject(pid, machine().mmap, [0, size, 0x3, private | anonymous | no_reserve | populate, -1, 0])
