"""What a worker gives up: capabilities, files, the network, other processes, new programs. It computes on mapped memory and needs none.

Two locks: seccomp refuses system calls by number, with EPERM, so that a refused one is an error to its caller and not a death; landlock,
where the kernel has it, refuses paths, ports and signals to others however they are reached. Imports only what worker_main does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Collection, Iterable, Sequence

PR_SET_SECCOMP_FILTER = 1  # SECCOMP_SET_MODE_FILTER
SECCOMP_SPEC_ALLOW = 1 << 2
"""Kernels before 5.16 would slow a filtered thread's speculation down; lanes hold no secrets from each other."""
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
CLONE_THREAD = 0x10000
X32 = 0x40000000
"""Numbers from here are calls of the x32 ABI."""

SHARED_MAPPINGS = 0b1010
"""Bits of a core dump's filter: shared memory without and with a file."""
LD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_MACHINE, AT_ARGUMENT_0 = 0, 4, 16
"""Offsets in struct seccomp_data; the low half of an argument comes first on machines of this byte order."""

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {"seccomp": (317, 277), "capset": (126, 91), "clone": (56, 220), "clone3": (435, 435)}
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # The network. The control socket is written as a file and read by recvmsg, since descriptors come with what is said on it: there is no
    # other socket that could be read, nor a way to one.
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "recvfrom": (45, 207),
    "recvmmsg": (299, 243),
    "io_uring_setup": (425, 425),
    # Programs and processes; clone is let through for threads only.
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    # Files by name.
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "creat": (85, None),
    "open_by_handle_at": (304, 265),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    # Wide doors into the kernel.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "unshare": (272, 97),
    "setns": (308, 268),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
}
"""System calls by number on x86-64 and 64-bit Arm, None where there is no such call."""

LANDLOCK_CREATE, LANDLOCK_RESTRICT = 444, 446  # the same on every machine
LANDLOCK_VERSION = 1
FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
"""All rights on files that a version knows; 0xFFFF from 5 on."""


def lock_down() -> list[str]:
    """Gives up all of the above, for good and for every thread started from now on. Needs no_new_privs. Returns what was refused."""
    refused = []
    for what, step in (("capabilities", _drop_capabilities), ("landlock", _landlock), ("seccomp", _seccomp)):
        try:
            step()
        except OSError as error:
            refused.append(f"{what}: {error.strerror}")
    # Landlock shuts what seccomp shuts as well: its absence alone is no loss worth telling.
    return [text for text in refused if not text.startswith("landlock") or any("seccomp" in other for other in refused)]


def prefer_death(points: int) -> str:
    """Makes the kernel, short of memory, choose this process before its parent: it can be replaced. Returns what was refused."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            wanted = min(1000, int(file.read()) + points)
            file.seek(0)
            file.write(str(wanted))
    except (OSError, ValueError) as refusal:
        return f"oom_score_adj: {refusal}"
    return ""


def close_all_but(kept: Collection[int]) -> None:
    """Closes every descriptor but these; what was mapped through one stays mapped."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))


def dump_no_shared_memory() -> None:
    """Keeps weights and KV memory (what people asked) out of a core dump: private memory is a few MiB and is all that tells of a crash."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/coredump_filter", "r+", encoding="ascii") as file:
        kept = int(file.read(), 16) & ~SHARED_MAPPINGS
        file.seek(0)
        file.write(hex(kept))


# ---------------------------------------------------------------- seccomp

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def filter_program(machine: str, *, refused: Iterable[str] = REFUSED) -> list[Instruction]:
    """The filter for a machine; KeyError if it is not known. clone3 does not exist under it: its flags can't be seen, and C libraries then
    use clone."""
    column = list(AUDIT).index(machine)
    numbers = [number for name in refused if (number := REFUSED[name][column]) is not None]
    refuse, missing, allow = (RETURN, 0, 0, RET_ERRNO | errno.EPERM), (RETURN, 0, 0, RET_ERRNO | errno.ENOSYS), (RETURN, 0, 0, RET_ALLOW)
    program: list[Instruction] = [(LD_WORD, 0, 0, AT_MACHINE), (JUMP_EQUAL, 1, 0, AUDIT[machine]), refuse, (LD_WORD, 0, 0, AT_NUMBER)]
    if machine == "x86_64":
        program += [(JUMP_AT_LEAST, 0, 1, X32), refuse]
    for number in numbers:
        program += [(JUMP_EQUAL, 0, 1, number), refuse]
    program += [(JUMP_EQUAL, 0, 1, CALLS["clone3"][column]), missing]
    program += [(JUMP_EQUAL, 0, 3, CALLS["clone"][column]), (LD_WORD, 0, 0, AT_ARGUMENT_0), (JUMP_ANY_BIT, 1, 0, CLONE_THREAD), refuse]
    return [*program, allow]


def _seccomp() -> None:
    install(filter_program(_machine()))


def install(program: Sequence[Instruction]) -> None:
    """Puts a filter over all calls of this thread and those it starts, for good. OSError."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    argument = Filter(len(program), ctypes.addressof(buffer))
    _call(_number("seccomp"), PR_SET_SECCOMP_FILTER, SECCOMP_SPEC_ALLOW, ctypes.byref(argument))


# ---------------------------------------------------------------- landlock and capabilities


def _landlock() -> None:
    version = _call(LANDLOCK_CREATE, None, 0, LANDLOCK_VERSION)
    handled = [FILE_RIGHTS.get(version, 0xFFFF)]
    handled += [0b11] if version >= 4 else []  # TCP: bind and connect
    handled += [0b11] if version >= 6 else []  # abstract sockets, and signals, beyond this process
    ruleset = _call(LANDLOCK_CREATE, struct.pack(f"={len(handled)}Q", *handled), 8 * len(handled), 0)  # without a rule: nothing is allowed
    try:
        _call(LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _drop_capabilities() -> None:
    """None are needed, whoever started the server."""
    _call(_number("capset"), struct.pack("=Ii", 0x20080522, 0), bytes(24))


def _machine() -> str:
    machine = os.uname().machine
    if machine not in AUDIT:
        raise OSError(errno.ENOSYS, f"not known on {machine}")
    return machine


def _number(name: str) -> int:
    return CALLS[name][list(AUDIT).index(_machine())]


def _call(number: int, *arguments: object) -> int:
    """A system call. OSError."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
