"""Ways for workers to die or to go, and what each costs a caller at most."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from colibri.v1 import operator_pb2 as op
from tests.fault.harness import signalled, wait_for
from tests.fault.inject import exit_quietly, take_memory
from tests.fault.memory_group import MemoryGroup
from tests.fault.served import START_S, RolledBack, Served

RECOVERY_S = 10
"""A worker that is not back by then is an error of its own."""
MOST_WORKERS = 4
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
    stall_s: float = 0.0  # longest pause of a stream meanwhile

    @property
    def recovery_s(self) -> float:
        return self.end - self.begin


def strike(kind: Kind, served: Served, rng: random.Random) -> Event:
    """Applies a fault and waits until new workers compute in place of those it struck."""
    begin = time.monotonic()
    struck = set(kind.apply(served, rng))

    def replaced() -> bool:
        ready = {worker.pid: worker.tasks for worker in served.ready()}
        return len(ready) == served.wanted and not struck & ready.keys() and all(ready.values())

    wait_for(replaced, seconds=RECOVERY_S, what=f"workers in place of {sorted(struck)} after {kind.name}")
    return Event(kind.name, begin, time.monotonic())


# ---------------------------------------------------------------- kinds


def by_signal(number: signal.Signals, *, stall_s: float) -> Kind:
    """A signal to one worker."""

    def apply(served: Served, rng: random.Random) -> list[int]:
        victim = rng.choice(served.ready()).pid
        signalled(victim, number)
        return [victim]

    return Kind(number.name, apply, stall_s, recovery_s=max(1.0, 1.0 + stall_s))


def _all_at_once(served: Served, rng: random.Random) -> list[int]:
    victims = [worker.pid for worker in served.ready()]
    for victim in victims:
        signalled(victim, signal.SIGKILL)
    return victims


def _while_starting(served: Served, rng: random.Random) -> list[int]:
    """Kills a worker, then its successor as soon as there is one."""
    victim = rng.choice(served.ready()).pid
    before = set(served.pids())
    signalled(victim, signal.SIGKILL)
    wait_for(lambda: bool(set(served.pids()) - before), seconds=RECOVERY_S, what="a successor")
    successors = set(served.pids()) - before
    for successor in successors:
        signalled(successor, rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP]))
    return [victim, *successors]


def _exit_quietly(served: Served, rng: random.Random) -> list[int]:
    victim = rng.choice(served.ready()).pid
    return [victim] if exit_quietly(victim) else []


def out_of_memory(group: MemoryGroup) -> Kind:
    """A worker takes more memory than the group of all processes may have; the kernel kills in it."""

    def apply(served: Served, rng: random.Random) -> list[int]:
        victim = rng.choice(served.ready()).pid
        kills = group.kills()
        group.limit(group.used() + SPARE)
        if not take_memory(victim, 4 * SPARE):
            return []
        wait_for(lambda: group.kills() > kills, seconds=RECOVERY_S, what="the kernel kills")
        group.limit(1 << 40)
        return [victim]

    return Kind("memory limit", apply, stall_s=0.5)


# ---------------------------------------------------------------- what operators do


def _scale_up(served: Served, rng: random.Random) -> list[int]:
    served.scale(min(MOST_WORKERS, served.wanted + rng.randint(1, 2)))
    return []


def _scale_down(served: Served, rng: random.Random) -> list[int]:
    served.scale(max(1, served.wanted - rng.randint(1, 2)))
    return []


def _scale_amid_kills(served: Served, rng: random.Random) -> list[int]:
    """Kills a worker while the number of workers changes. The change may fail, but then all is as it was."""
    victim, wish = rng.choice(served.ready()).pid, rng.randint(1, MOST_WORKERS)
    killer = threading.Timer(rng.uniform(0.0, 0.3), signalled, (victim, signal.SIGKILL))
    killer.start()
    with contextlib.suppress(RolledBack):
        served.scale(wish)
    killer.join()
    return [victim]


def _drain(served: Served, rng: random.Random) -> list[int]:
    """Drains a worker, then asks for as many as there were."""
    victim = rng.choice(served.ready())
    served.operator.Drain(op.DrainRequest(worker=victim.index), timeout=START_S)
    served.scale(served.wanted)
    return [victim.pid]


def _restart(served: Served, rng: random.Random) -> list[int]:
    victim = rng.choice(served.ready())
    served.operator.RestartWorker(op.RestartWorkerRequest(worker=victim.index), timeout=START_S)
    return [victim.pid]


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
        Kind("scale up", _scale_up, stall_s=0.1, recovery_s=2.0),
        Kind("scale down", _scale_down, stall_s=0.1, recovery_s=2.0),
        Kind("scale amid kills", _scale_amid_kills, stall_s=0.1, recovery_s=3.0),
        Kind("drain", _drain, stall_s=0.1, recovery_s=3.0),
        Kind("restart", _restart, stall_s=0.1, recovery_s=2.0),
    ]
