"""Runs a program to which the kernel refuses memory policies, as containers without SYS_NICE have it: deny.py PROGRAM ARGUMENT...

A seccomp filter answers mbind, set_mempolicy, migrate_pages and move_pages with EPERM, for the program and all its children.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

DENIED = (237, 238, 256, 279)  # x86-64: mbind, set_mempolicy, migrate_pages, move_pages

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD_WORD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def _filter() -> bytes:
    """Instructions (code, jump if true, jump if false, operand): the number of the call is the first word of what is looked at."""
    code = [(_LOAD_WORD, 0, 0, 0)]
    for i, number in enumerate(DENIED):
        code.append((_JUMP_EQUAL, len(DENIED) - i, 0, number))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def main(command: list[str]) -> None:
    """Does not return."""
    code = _filter()
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
