"""A worker may die in any way at any moment: no token changes, it comes back, nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_c import EngineError
from tests.fault.harness import Decoding, children, config, descriptors, wait_for
from workers.lifecycle import RestartPolicy, State
from workers.slot import SupervisorConfig
from workers.supervisor import SupervisorSnapshot
from workers.team import Team

Strike = Callable[[Team, int], None]
PATIENT = SupervisorConfig(policy=RestartPolicy(stable_s=0.0))
"""Deaths in quick succession are the point of these tests: no waiting, no giving up."""


def by_signal(number: signal.Signals) -> Strike:
    def strike(team: Team, index: int) -> None:
        pid = team.supervisor.snapshot().workers[index].pid
        if pid is not None:
            os.kill(pid, number)

    return strike


def by_exit(team: Team, index: int) -> None:
    """A lane that is asked to leave returns; with its last lane the process calls _exit(0), unasked as far as the supervisor knows."""
    for lane in team.supervisor.snapshot().workers[index].lanes:
        team.session.lane_leave(lane)


STRIKES = {
    "SIGKILL": by_signal(signal.SIGKILL),
    "SIGSEGV": by_signal(signal.SIGSEGV),
    "SIGABRT": by_signal(signal.SIGABRT),
    "SIGTERM": by_signal(signal.SIGTERM),
    "SIGSTOP": by_signal(signal.SIGSTOP),
    "exit(0)": by_exit,
}


def settled(team: Team) -> bool:
    """Everybody ready, nobody stopped."""
    pids = [worker.pid for worker in team.supervisor.snapshot().workers if worker.state is State.READY]
    return len(pids) == len(team.plan.workers) and not any(state_of(pid) == "T" for pid in pids if pid is not None)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def tasks(team: Team) -> list[int]:
    return [worker.tasks for worker in team.supervisor.snapshot().workers]


@pytest.mark.parametrize("how", STRIKES)
def test_a_worker_that_dies_between_steps_loses_no_token(how: str, model: Path, undisturbed: list[list[int]]) -> None:
    with Team.open(model, config(2, supervisor=PATIENT)) as team:
        fds = descriptors()

        def before_step(step: int) -> None:
            if step % 20 == 10:
                STRIKES[how](team, step // 20 % 2)

        assert Decoding().run(team.session, before_step=before_step) == undisturbed
        wait_for(lambda: settled(team), seconds=10, what="both workers back")
        assert sum(worker.restarts for worker in team.supervisor.snapshot().workers) >= 2
        before = tasks(team)
        assert Decoding().run(team.session) == undisturbed
        assert all(now > then for now, then in zip(tasks(team), before, strict=True)), "a restarted worker does not compute"
        assert len(children()) == 2
        assert descriptors() == fds
    assert children() == []


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "SIGSTOP"])
def test_a_worker_that_dies_within_a_step_loses_no_token(how: str, model: Path, undisturbed: list[list[int]]) -> None:
    """Strikes at random times until tasks had to be taken over from a dead lane, each run's tokens compared."""
    rng = random.Random(how)
    deadline = time.monotonic() + 60
    with Team.open(model, config(3, supervisor=PATIENT)) as team:
        fds = descriptors()
        rerun = 0
        while rerun < 3:
            assert time.monotonic() < deadline, f"only {rerun} tasks were rerun in 60 s"
            decoding, done = Decoding(), threading.Event()

            def strike_at_random(done: threading.Event = done) -> None:
                while not done.wait(rng.uniform(0.002, 0.03)):
                    index = rng.randrange(3)
                    if team.supervisor.snapshot().workers[index].state is State.READY:
                        STRIKES[how](team, index)

            thread = threading.Thread(target=strike_at_random)
            thread.start()
            try:
                assert decoding.run(team.session) == undisturbed
            finally:
                done.set()
                thread.join()
            rerun += decoding.rerun
        wait_for(lambda: settled(team), seconds=10, what="all workers back")
        assert Decoding().run(team.session) == undisturbed
        assert len(children()) == 3
        assert descriptors() == fds
    assert children() == []


def test_all_workers_killed_at_once_leave_the_step_to_the_front_end(model: Path, undisturbed: list[list[int]]) -> None:
    with Team.open(model, config(3, supervisor=PATIENT)) as team:

        def before_step(step: int) -> None:
            if step == 20:
                for index in range(3):
                    STRIKES["SIGKILL"](team, index)

        assert Decoding().run(team.session, before_step=before_step) == undisturbed


def test_without_a_front_lane_a_step_with_nobody_left_is_an_error_and_the_next_one_works(model: Path, undisturbed: list[list[int]]) -> None:
    with Team.open(model, config(1, supervisor=PATIENT, front_lane=False)) as team:
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

        took = wait_for(computes, seconds=2, what="the worker back at work")
        assert took < 1.0
        assert team.supervisor.snapshot().workers[0].last_end == "killed by SIGKILL"


def test_a_stopped_worker_holds_a_step_up_no_longer_than_the_deadline(model: Path, undisturbed: list[list[int]]) -> None:
    """hang_ms is 100: the longest step may take that, detection and one step's work."""
    with Team.open(model, config(2, supervisor=PATIENT)) as team:
        decoding, done = Decoding(), threading.Event()

        def stop_often() -> None:
            rng = random.Random(4)
            while not done.wait(rng.uniform(0.002, 0.02)):
                for index in range(2):
                    STRIKES["SIGSTOP"](team, index)

        thread = threading.Thread(target=stop_often)
        thread.start()
        try:
            assert decoding.run(team.session) == undisturbed
        finally:
            done.set()
            thread.join()
        assert max(stats.step_ns for stats in decoding.stats) < 1e9


def test_an_idle_worker_that_is_stopped_is_replaced(model: Path) -> None:
    quick = SupervisorConfig(look_s=0.05)
    with Team.open(model, config(1, supervisor=quick)) as team:
        first = team.supervisor.snapshot().workers[0].pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        wait_for(lambda: settled(team) and team.supervisor.snapshot().workers[0].pid != first, seconds=5, what="a new worker")
        assert team.supervisor.snapshot().workers[0].last_end == "killed by SIGKILL (it was stopped)"


def test_a_worker_that_keeps_dying_is_given_up_until_somebody_asks(model: Path, undisturbed: list[list[int]]) -> None:
    policy = RestartPolicy(stable_s=60, base_s=0.01, crash_limit=4)
    with Team.open(model, config(2, supervisor=SupervisorConfig(policy=policy))) as team:

        def worker(snapshot: SupervisorSnapshot) -> State:
            return snapshot.workers[0].state

        def strike_until_it_fails() -> bool:
            if worker(team.supervisor.snapshot()) is State.READY:
                STRIKES["SIGKILL"](team, 0)
            return worker(team.supervisor.snapshot()) is State.FAILED

        wait_for(strike_until_it_fails, seconds=20, what="giving up")
        failed = team.supervisor.snapshot().workers[0]
        assert failed.error == "killed by SIGKILL; 4 quick ends in a row"
        assert failed.pid is None
        assert Decoding().run(team.session) == undisturbed
        team.supervisor.restart(0)
        wait_for(lambda: settled(team), seconds=10, what="the worker back")
