"""Workers added and taken away while a session steps, with something going wrong each time: no step fails, no token changes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine_c import LANE_READY
from tests.fault.harness import PATIENCE, Decoding, children, config, wait_for
from workers import process
from workers.lifecycle import RestartPolicy, State
from workers.plan import TeamPlan
from workers.scaling import ScaleError
from workers.supervisor import SupervisorConfig
from workers.team import Team, TeamConfig

TIMEOUT = 20.0 * PATIENCE
QUICK = SupervisorConfig(drain_s=0.3, term_s=0.2, policy=RestartPolicy(boot_limit=2))


@contextlib.contextmanager
def stepping(model: Path, wish: TeamConfig, undisturbed: list[list[int]]) -> Iterator[Team]:
    """A team whose session steps all the while, on a thread; at the end every run of it must have said the same."""
    wrong: list[str] = []
    runs = 0
    done = threading.Event()
    with Team.open(model, wish) as team:

        def step() -> None:
            nonlocal runs
            try:
                while not done.is_set():
                    if Decoding().run(team.session) != undisturbed:
                        wrong.append("a token changed")
                    runs += 1
            except Exception as error:  # reported below, on the thread that can fail the test
                wrong.append(f"a step failed: {error}")

        thread = threading.Thread(target=step)
        thread.start()
        try:
            yield team
            before = runs
            wait_for(lambda: runs >= before + 2 or bool(wrong), seconds=20, what="two more runs")
        finally:
            done.set()
            thread.join()
    assert wrong == []


def pids(team: Team) -> dict[int, int | None]:
    """Of the workers that are ready, by index."""
    return {worker.index: worker.pid for worker in team.supervisor.snapshot().workers if worker.state is State.READY}


def on_node_0(plan: TeamPlan) -> list[int]:
    return [len(spec.lanes) for spec in plan.workers if spec.node == 0]


class KillNewcomers:
    """Kills the first `times` new child processes as soon as they appear."""

    def __init__(self, times: int) -> None:
        self.killed = 0
        self._times = times
        self._known = {child.pid for child in psutil.Process().children()}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while self.killed < self._times and not self._done.is_set():
            for child in psutil.Process().children():
                if child.pid not in self._known and self.killed < self._times:
                    self._known.add(child.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                        self.killed += 1

    def __enter__(self) -> KillNewcomers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@pytest.mark.parametrize("front_lane", [True, False])
def test_2_to_4_to_1_to_3_with_a_fault_at_each_step(
    front_lane: bool, model: Path, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = config(2, supervisor=QUICK, front_lane=front_lane)
    with stepping(model, wish, undisturbed) as team:
        first = pids(team)
        assert sorted(first) == [0, 1]

        with monkeypatch.context() as patch:  # newcomers that can't start: nothing changes
            patch.setattr(process, "IMPORT_PATHS", ("/nonexistent",))
            former = team.plan
            with pytest.raises(ScaleError, match=r"(?s)the workers stay as they were: worker [23] .*No module named"):
                team.scale(0, workers=4, timeout=TIMEOUT)
            assert team.plan == former
            assert pids(team) == first, "nobody who computed was touched"
        assert on_node_0(team.scale(0, workers=4, timeout=TIMEOUT)) == [1, 1, 1, 1]
        four = pids(team)
        assert {index: four[index] for index in first} == first

        stopped = four[3]
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)  # one that is to leave hangs
        assert on_node_0(team.scale(0, workers=1, timeout=TIMEOUT)) == [1]
        assert pids(team) == {0: first[0]}

        with KillNewcomers(2) as killer:
            assert on_node_0(team.scale(0, workers=3, timeout=TIMEOUT)) == [1, 1, 1]
        assert killer.killed == 2
        three = pids(team)
        assert len(three) == len(children()) == 3
        assert three[0] == first[0]

        assert team.scale(0, workers=3, timeout=TIMEOUT) == team.plan
        assert pids(team) == three, "the same again changes nothing"
    assert children() == []


def test_a_change_that_takes_too_long_is_taken_back(
    model: Path, undisturbed: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with stepping(model, config(1, supervisor=QUICK), undisturbed) as team:
        before = pids(team)
        with monkeypatch.context() as patch:
            patch.setattr(process, "MAIN", script)
            with pytest.raises(ScaleError, match=r"the workers stay as they were: not ready after .*: worker 1"):
                team.scale(0, workers=2, timeout=0.5)
        assert pids(team) == before
        assert len(children()) == 1


def test_other_threads_replace_workers_without_a_gap(model: Path, undisturbed: list[list[int]]) -> None:
    """With no front-end lane somebody must always compute: newcomers come before the former leave."""
    with stepping(model, config(1, threads=2, front_lane=False), undisturbed) as team:
        assert on_node_0(team.plan) == [2]
        assert on_node_0(team.scale(0, workers=3, threads=1, timeout=TIMEOUT)) == [1, 1, 1]
        assert on_node_0(team.scale(0, workers=1, threads=3, timeout=TIMEOUT)) == [3]
        assert len(children()) == 1


def test_drained_workers_stay_away_until_asked_for(model: Path, undisturbed: list[list[int]]) -> None:
    with stepping(model, config(3), undisturbed) as team:
        all_three = pids(team)
        for _ in range(2):  # the second time changes nothing
            assert [spec.index for spec in team.drain_worker(1, TIMEOUT).workers] == [0, 2]
        assert pids(team) == {0: all_three[0], 2: all_three[2]}
        assert [spec.index for spec in team.plan.drained] == [1]
        assert [spec.index for spec in team.restart_worker(1, TIMEOUT).workers] == [0, 1, 2]
        again = pids(team)
        assert (again[0], again[2]) == (all_three[0], all_three[2])
        assert team.drain_node(0, TIMEOUT).workers == ()
        assert (pids(team), children()) == ({}, [])
        assert on_node_0(team.scale(0, workers=2, timeout=TIMEOUT)) == [1, 1]
        for change in (team.drain_worker, team.restart_worker, team.drain_node):
            with pytest.raises(KeyError):
                change(7, TIMEOUT)


@pytest.mark.parametrize("front_lane", [True, False])
def test_a_restarted_worker_is_another_process_in_the_same_place(front_lane: bool, model: Path, undisturbed: list[list[int]]) -> None:
    with stepping(model, config(1, front_lane=front_lane), undisturbed) as team:
        before, plan = pids(team), team.plan
        assert team.restart_worker(0, TIMEOUT) == plan
        after = pids(team)
        assert list(after) == [0]
        assert after != before
        assert len(children()) == 1


def test_the_last_that_computes_can_not_be_drained(model: Path, undisturbed: list[list[int]]) -> None:
    with stepping(model, config(1, front_lane=False), undisturbed) as team:
        before = pids(team)
        with pytest.raises(ScaleError, match="nothing would compute"):
            team.drain_worker(0, TIMEOUT)
        with pytest.raises(ScaleError, match="nothing would compute"):
            team.scale(0, workers=0, timeout=TIMEOUT)
        assert pids(team) == before


def test_two_operators_at_once_come_one_after_the_other(model: Path, undisturbed: list[list[int]]) -> None:
    with stepping(model, config(1), undisturbed) as team:
        found: list[tuple[float, int]] = []

        def scale(workers: int) -> None:
            plan = team.scale(0, workers=workers, timeout=TIMEOUT)
            found.append((time.monotonic(), len(plan.workers)))

        threads = [threading.Thread(target=scale, args=(workers,)) for workers in (2, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(count for _, count in found) == [2, 4]
        assert len(team.plan.workers) == max(found)[1] == len(pids(team)) == len(children())


def test_a_worker_in_trouble_elsewhere_does_not_fail_a_change(model: Path, undisturbed: list[list[int]]) -> None:
    """Worker 0 has failed for now; adding another must not wait for it."""
    settings = replace(QUICK, policy=RestartPolicy(crash_limit=1, stable_s=1e9, retry_s=600.0))
    with stepping(model, config(1, supervisor=settings), undisturbed) as team:
        victim = pids(team)[0]
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: team.supervisor.snapshot().workers[0].state is State.FAILED, seconds=5, what="the worker has failed")
        assert on_node_0(team.scale(0, workers=2, timeout=TIMEOUT)) == [1, 1]
        assert list(pids(team)) == [1]
        team.restart_worker(0, TIMEOUT)
        assert sorted(pids(team)) == [0, 1]


def test_lanes_are_free_for_another_only_once_the_process_that_had_them_has_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with much memory takes a while to end after its lanes have left: its end must not take away who has them next."""
    script = tmp_path / "slow_end.py"
    script.write_text(
        f"import os, sys, time\nsys.path += {process.IMPORT_PATHS!r}\nfrom workers import worker_main\nend = os._exit\n"
        "os._exit = lambda code: (time.sleep(0.5), end(code))\nworker_main.main(sys.argv[1:])\n"
    )
    monkeypatch.setattr(process, "MAIN", script)
    with Team.open(model, config(1)) as team:
        (former,) = team.plan.workers
        scaling = threading.Thread(target=team.scale, args=(0,), kwargs={"workers": 1, "threads": team.plan.max_lanes, "timeout": TIMEOUT})
        scaling.start()
        most = 0
        while scaling.is_alive():
            most = max(most, len(children()))
        (newcomer,) = team.plan.workers
        assert newcomer.index != former.index
        assert not set(newcomer.lanes).isdisjoint(former.lanes)
        assert most == 1
        assert {team.session.lane_state(lane) for lane in newcomer.lanes} == {LANE_READY}
