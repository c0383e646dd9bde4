"""Ways for workers to die or to go, and what each costs a caller at most."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.fault.harness import wait_for
from tests.fault.inject import exit_quietly, take_memory
from tests.fault.memory_group import MemoryGroup
from tests.fault.served import Served

RECOVERY_S = 10
"""A worker that is not back by then is an error of its own."""
SPARE = 96 << 20
"""Bytes a group may grow by before the kernel kills."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A fault. apply returns the processes it struck; stall_s is what a stream may see of it beside a step, recovery_s how soon new workers
    compute in place of the old."""

    name: str
    apply: Callable[[Served, random.Random], list[int]]
    stall_s: float
    recovery_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Event:
    """One fault as it went; times are time.monotonic's."""

    kind: str
    begin: float
    end: float  # all workers are back and compute

    @property
    def recovery_s(self) -> float:
        return self.end - self.begin


def strike(kind: Kind, served: Served, rng: random.Random) -> Event:
    """Applies a fault and waits until new workers compute in place of those it struck."""
    begin = time.monotonic()
    struck = set(kind.apply(served, rng))

    def replaced() -> bool:
        ready = served.ready()
        return len(ready) == served.wanted and not struck.intersection(ready) and all(computes(pid) for pid in ready)

    wait_for(replaced, seconds=RECOVERY_S, what=f"workers in place of {sorted(struck)} after {kind.name}")
    return Event(kind.name, begin, time.monotonic())


def computes(pid: int) -> bool:
    """Whether a lane of a worker has had CPU time: anything but its main thread, which waits for the front end's end."""
    try:
        lanes = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
        return any(int(open(f"/proc/{pid}/task/{lane}/schedstat").read().split()[0]) for lane in lanes)
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------- kinds


def by_signal(number: signal.Signals, *, stall_s: float) -> Kind:
    """A signal to one worker."""

    def apply(served: Served, rng: random.Random) -> list[int]:
        victim = rng.choice(served.ready())
        os.kill(victim, number)
        return [victim]

    return Kind(number.name, apply, stall_s, recovery_s=max(1.0, 1.0 + stall_s))


def _all_at_once(served: Served, rng: random.Random) -> list[int]:
    victims = served.ready()
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    return victims


def _while_starting(served: Served, rng: random.Random) -> list[int]:
    """Kills a worker, then its successor as soon as there is one."""
    victim = rng.choice(served.ready())
    before = set(served.pids())
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: bool(set(served.pids()) - before), seconds=RECOVERY_S, what="a successor")
    successors = set(served.pids()) - before
    for successor in successors:
        os.kill(successor, rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP]))
    return [victim, *successors]


def _exit_quietly(served: Served, rng: random.Random) -> list[int]:
    victim = rng.choice(served.ready())
    return [victim] if exit_quietly(victim) else []


def out_of_memory(group: MemoryGroup) -> Kind:
    """A worker takes more memory than the group of all processes may have; the kernel kills in it."""

    def apply(served: Served, rng: random.Random) -> list[int]:
        victim = rng.choice(served.ready())
        kills = group.kills()
        group.limit(group.used() + SPARE)
        if not take_memory(victim, 4 * SPARE):
            return []
        wait_for(lambda: group.kills() > kills, seconds=RECOVERY_S, what="the kernel kills")
        group.limit(1 << 40)
        return [victim]

    return Kind("memory limit", apply, stall_s=0.5)


def kinds(deadline_s: float) -> list[Kind]:
    """All that need nothing special. deadline_s: the server's progress deadline (hang_ms)."""
    return [
        by_signal(signal.SIGKILL, stall_s=0.1),
        by_signal(signal.SIGSEGV, stall_s=0.1),
        by_signal(signal.SIGABRT, stall_s=0.1),
        by_signal(signal.SIGSTOP, stall_s=deadline_s),
        Kind("_exit(0)", _exit_quietly, stall_s=0.1),
        Kind("SIGKILL of all", _all_at_once, stall_s=0.1),
        Kind("while starting", _while_starting, stall_s=deadline_s, recovery_s=2.0 + deadline_s),
    ]
