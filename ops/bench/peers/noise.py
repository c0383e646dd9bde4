"""How much of the machine somebody else used while a sample was taken."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # fields of /proc/stat's first line: idle, waiting for input and output
_LOOK = 0.2  # seconds
_GUEST = 8  # and after: already counted as user's


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds since the machine started: of all processes and what a hypervisor took, and of this process and its descendants."""

    at: float  # time.monotonic()
    everyone: float
    own: float


def usage() -> Usage:
    """Now."""
    fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    busy = sum(ticks for index, ticks in enumerate(fields[:_GUEST]) if index not in _IDLE)
    return Usage(time.monotonic(), busy / _TICKS, _own())


def others(before: Usage, after: Usage, *, cpus: int) -> float:
    """The share of all CPUs' time between the two that was not ours. Clock ticks make it uncertain by a per cent or so."""
    taken = after.everyone - before.everyone - (after.own - before.own)
    return max(0.0, taken / max(cpus * (after.at - before.at), 1e-9))


def wait_quiet(limit: float, *, cpus: int, patience: float) -> None:
    """Returns once others use no more than `limit` of the CPUs, or patience (seconds) ends."""
    end = time.monotonic() + patience
    before = usage()
    while time.monotonic() < end:
        time.sleep(_LOOK)
        after = usage()
        if others(before, after, cpus=cpus) <= limit:
            return
        before = after


def _own() -> float:
    """A child's time is in its parent's once it has been waited for."""
    this = psutil.Process()
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has just ended
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
