"""A decode loop to disturb, and what to look at afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import psutil

from engine_c import KV_BLOCK, SeqWork, Session, SessionOptions, StepStats
from workers.supervisor import SupervisorConfig
from workers.team import TeamConfig

PATIENCE = 10 if "COLIBRI_SANITIZER" in os.environ else 1
"""Time limits are of ordinary builds; an instrumented one, also of the workers, is several times slower."""


def limit(seconds: float) -> float:
    """What may take so long on an idle machine, on this one as it is: longer if more wants to run than it has CPUs for."""
    return seconds * PATIENCE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


SEQUENCES = 16
STEPS = 60
LONG = 48  # tokens of a long prompt
BLOCKS = -(-(STEPS + LONG) // KV_BLOCK)  # of each sequence
OPTIONS = SessionOptions(max_rows=1024, max_seqs=SEQUENCES, max_logit_rows=SEQUENCES, kv_blocks=SEQUENCES * BLOCKS, hang_ms=100)
PATIENT_MS = 5000
"""hang_ms where hanging is not the subject: on a busy machine a lane may wait for its CPU longer than OPTIONS lets it."""


def config(
    workers: int, *, threads: int = 1, supervisor: SupervisorConfig | None = None, front_lane: bool = True, hang_ms: int = PATIENT_MS
) -> TeamConfig:
    """A team of so many workers on each node."""
    return TeamConfig(
        workers_per_node=workers,
        threads_per_worker=threads,
        front_lane="on" if front_lane else "off",
        session=replace(OPTIONS, hang_ms=hang_ms),
        supervisor=supervisor or SupervisorConfig(),
    )


@dataclass
class Decoding:
    """SEQUENCES greedy sequences, prefilled together and then decoded together. Prompts have 1 to 31 tokens, or `prompt` each."""

    prompt: int | None = None
    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SEQUENCES)])
    stats: list[StepStats] = field(default_factory=list)

    def run(self, session: Session, *, steps: int = STEPS, before_step: Callable[[int], None] = lambda step: None) -> list[list[int]]:
        """The tokens of every sequence. before_step(step) is called before each step."""
        blocks = [range(i * BLOCKS, (i + 1) * BLOCKS) for i in range(SEQUENCES)]
        lengths = [self.prompt or 1 + 2 * i for i in range(SEQUENCES)]
        work = [SeqWork([(7 * i + j) % 500 for j in range(lengths[i])], 0, blocks[i], 1) for i in range(SEQUENCES)]
        for step in range(steps):
            before_step(step)
            results, stats = session.step(work)
            self.stats.append(stats)
            for i, result in enumerate(results):
                assert result.ok, result.error
                token = result.rows[0].token
                self.tokens[i].append(token)
                work[i] = SeqWork([token], work[i].start + len(work[i].tokens), blocks[i], 1)
        return self.tokens

    @property
    def rerun(self) -> int:
        """Tasks taken over from dead lanes."""
        return sum(stats.tasks_rerun for stats in self.stats)


def wait_for(condition: Callable[[], bool], *, seconds: float, what: str) -> float:
    """Polls until the condition holds; returns how long that took. Fails after the deadline."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds * PATIENCE:
            raise AssertionError(f"{what}: not within {seconds * PATIENCE} s")
        time.sleep(0.002)
    return time.monotonic() - start


def signalled(pid: int, number: signal.Signals) -> bool:
    """Sends a signal; False if the process has ended since it was looked for, as those that were struck before may have."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def alive(pids: Sequence[int]) -> list[int]:
    """Those that still run (a zombie of a parent that is gone waits for init and holds nothing)."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def children() -> list[str]:
    """Our child processes, zombies included."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            found.append(f"{child.pid} {child.status()}")
    return found


def descriptors() -> list[str]:
    """What our open descriptors point to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            found.append(os.readlink(f"/proc/self/fd/{name}").split(":[")[0])
    return sorted(found)
