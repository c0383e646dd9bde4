"""A worker may die in any way at any moment: no token changes, it comes back, nothing is left behind."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_c import OPERATIONS, EngineError
from tests.fault.harness import LONG, OPTIONS, PATIENCE, Decoding, children, config, descriptors, limit, signalled, wait_for
from workers.lifecycle import RestartPolicy, State
from workers.slot import SupervisorConfig
from workers.team import Team

PATIENT = SupervisorConfig(stop_s=0.05, policy=RestartPolicy(stable_s=0.0))
"""Deaths in quick succession are the point of these tests: no waiting, no giving up."""

HUNG = re.compile(r"killed by SIGKILL \(hung for (\d+) ms in layer \d, (\w+)\)")
HOW = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGSTOP", "exit(0)")


class Striker:
    """Makes workers of a team die and remembers which."""

    def __init__(self, team: Team, how: str) -> None:
        self.team = team
        self.how = how
        self.struck: set[int] = set()

    def strike(self, index: int) -> None:
        """Strikes a worker if it is ready."""
        worker = self.team.supervisor.snapshot().workers[index]
        if worker.state is not State.READY or worker.pid is None:
            return
        if self.how == "exit(0)":
            # A lane that is asked to leave returns; with its last lane the process calls _exit(0), unasked as far as the supervisor knows.
            for lane in worker.lanes:
                self.team.session.lane_leave(lane)
        elif not signalled(worker.pid, signal.Signals[self.how]):
            return
        self.struck.add(worker.pid)

    def wait_until_replaced(self) -> None:
        """Until all workers are ready and none of them is one that was struck."""
        wait_for(self._replaced, seconds=10, what="new workers in place of those struck")

    def _replaced(self) -> bool:
        pids = {worker.pid for worker in self.team.supervisor.snapshot().workers if worker.state is State.READY}
        return len(pids) == len(self.team.plan.workers) and not pids & self.struck


@contextmanager
def striking_at_random(striker: Striker, *, seed: str) -> Iterator[None]:
    """Strikes random workers every few milliseconds meanwhile."""
    rng, done = random.Random(seed), threading.Event()
    workers = len(striker.team.plan.workers)

    def strike() -> None:
        while not done.wait(rng.uniform(0.002, 0.03)):
            striker.strike(rng.randrange(workers))

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def tasks(team: Team) -> list[int]:
    return [worker.tasks for worker in team.supervisor.snapshot().workers]


@pytest.mark.parametrize("how", HOW)
def test_a_worker_that_dies_between_steps_loses_no_token(how: str, model: Path, undisturbed: list[list[int]]) -> None:
    with Team.open(model, config(2, supervisor=PATIENT)) as team:
        fds = descriptors()
        striker = Striker(team, how)

        def before_step(step: int) -> None:
            if step % 20 == 10:
                striker.strike(step // 20 % 2)

        assert Decoding().run(team.session, before_step=before_step) == undisturbed
        striker.wait_until_replaced()
        assert sum(worker.restarts for worker in team.supervisor.snapshot().workers) == len(striker.struck) >= 2
        wait_for(lambda: Decoding().run(team.session) == undisturbed and all(tasks(team)), seconds=10, what="the new workers computing")
        assert len(children()) == 2
        assert not Counter(descriptors()) - Counter(fds), "nothing new; what others had open may go"
    assert children() == []


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "SIGSTOP"])
def test_a_worker_that_dies_within_a_task_loses_no_token(how: str, model: Path) -> None:
    """Strikes at random times, with long prompts and so long tasks, until tasks had to be taken over from a dead lane."""
    deadline = time.monotonic() + 60 * PATIENCE
    with Team.open(model, config(3, supervisor=PATIENT)) as team:
        expected = Decoding(LONG).run(team.session, steps=5)
        fds = descriptors()
        striker = Striker(team, how)
        for attempt in itertools.count():
            assert time.monotonic() < deadline, "no task was rerun in time"
            decoding = Decoding(LONG)
            with striking_at_random(striker, seed=f"{how} {attempt}"):  # each its own: a blow that comes too late must not do so again
                assert decoding.run(team.session, steps=5) == expected
            striker.wait_until_replaced()
            if decoding.rerun:
                break
        assert Decoding(LONG).run(team.session, steps=5) == expected
        assert len(children()) == 3
        assert not Counter(descriptors()) - Counter(fds), "nothing new; what others had open may go"
    assert children() == []


def test_all_workers_killed_at_once_leave_the_step_to_the_front_end(model: Path, undisturbed: list[list[int]]) -> None:
    with Team.open(model, config(3, supervisor=PATIENT)) as team:
        striker = Striker(team, "SIGKILL")

        def before_step(step: int) -> None:
            if step == 20:
                for index in range(3):
                    striker.strike(index)

        assert Decoding().run(team.session, before_step=before_step) == undisturbed


def test_without_a_front_lane_a_step_with_nobody_left_is_an_error_and_the_next_one_works(model: Path, undisturbed: list[list[int]]) -> None:
    slow = SupervisorConfig(policy=RestartPolicy(stable_s=60, free_restarts=0, base_s=1.0))
    with Team.open(model, config(1, supervisor=slow, front_lane=False)) as team:
        assert Decoding().run(team.session) == undisturbed
        victim = team.supervisor.snapshot().workers[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(EngineError) as refusal:
            Decoding().run(team.session)
        assert refusal.value.name == "ENOLANES"
        team.supervisor.wait_ready(10)
        assert Decoding().run(team.session) == undisturbed


def test_a_killed_worker_is_back_and_computing_within_a_second(model: Path) -> None:
    with Team.open(model, config(1)) as team:
        Decoding().run(team.session)
        worker = team.supervisor.snapshot().workers[0]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)

        def computes() -> bool:
            Decoding().run(team.session, steps=1)
            now = team.supervisor.snapshot().workers[0]
            return now.pid not in (worker.pid, None) and now.tasks > 0

        took = wait_for(computes, seconds=10, what="the worker back at work")
        assert took < limit(1.0)
        assert team.supervisor.snapshot().workers[0].last_end == "killed by SIGKILL"


def test_a_stopped_worker_holds_a_step_up_no_longer_than_the_deadline(model: Path, undisturbed: list[list[int]]) -> None:
    """hang_ms is 100: the longest step may take that, detection and one step's work."""
    with Team.open(model, config(2, supervisor=PATIENT, hang_ms=OPTIONS.hang_ms)) as team:
        decoding, striker = Decoding(), Striker(team, "SIGSTOP")
        with striking_at_random(striker, seed="stop"):
            assert decoding.run(team.session) == undisturbed
        assert max(stats.step_ns for stats in decoding.stats) < 1e9 * PATIENCE


def test_a_worker_that_hangs_within_a_task_is_killed_and_told_what_it_did(model: Path) -> None:
    """A lane that makes no progress: stopped, but nobody looks at that."""
    blind = SupervisorConfig(stop_s=600, policy=RestartPolicy(stable_s=0.0))
    deadline = time.monotonic() + 60 * PATIENCE
    with Team.open(model, config(3, supervisor=blind, hang_ms=OPTIONS.hang_ms)) as team:
        expected = Decoding(LONG).run(team.session, steps=5)
        rng = random.Random("hang")
        while not (ends := [worker.last_end for worker in team.supervisor.snapshot().workers if worker.last_end]):
            assert time.monotonic() < deadline, "no worker was stopped within a task in time"
            pids = [worker.pid for worker in team.supervisor.snapshot().workers if worker.pid is not None]
            stop = threading.Timer(rng.uniform(0.001, 0.02), signal_all, (pids, signal.SIGSTOP))
            stop.start()
            assert Decoding(LONG).run(team.session, steps=5) == expected
            stop.join()
            signal_all(pids, signal.SIGCONT)
    for end in ends:
        told = HUNG.fullmatch(end)
        assert told, ends
        assert int(told[1]) >= OPTIONS.hang_ms
        assert told[2] in OPERATIONS


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """To those that are still there."""
    for pid in pids:
        signalled(pid, number)


def test_an_idle_worker_that_is_stopped_is_replaced(model: Path) -> None:
    quick = SupervisorConfig(stop_s=0.05)
    with Team.open(model, config(1, supervisor=quick)) as team:
        striker = Striker(team, "SIGSTOP")
        striker.strike(0)
        striker.wait_until_replaced()
        assert team.supervisor.snapshot().workers[0].last_end == "killed by SIGKILL (it was stopped)"


def test_a_worker_that_keeps_dying_is_left_alone_until_somebody_asks(model: Path, undisturbed: list[list[int]]) -> None:
    policy = RestartPolicy(stable_s=60, base_s=0.01, crash_limit=4, retry_s=600)
    with Team.open(model, config(2, supervisor=SupervisorConfig(policy=policy))) as team:
        striker = Striker(team, "SIGKILL")

        def fails() -> bool:
            striker.strike(0)
            return team.supervisor.snapshot().workers[0].state is State.FAILED

        wait_for(fails, seconds=20, what="giving up")
        failed = team.supervisor.snapshot().workers[0]
        assert failed.error == "killed by SIGKILL; 4 quick ends in a row"
        assert failed.pid is None
        assert Decoding().run(team.session) == undisturbed
        team.supervisor.restart(0)
        striker.wait_until_replaced()


def test_a_worker_that_kept_dying_is_back_by_itself_when_the_cause_has_gone(model: Path, undisturbed: list[list[int]]) -> None:
    policy = RestartPolicy(stable_s=60, free_restarts=0, base_s=0.01, crash_limit=2, retry_s=0.2)
    with Team.open(model, config(1, supervisor=SupervisorConfig(policy=policy), front_lane=False)) as team:
        striker = Striker(team, "SIGKILL")
        for _ in range(5):  # more than the limit: each failure is followed by another start
            striker.strike(0)
            striker.wait_until_replaced()
        assert Decoding().run(team.session) == undisturbed
