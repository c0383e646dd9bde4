"""Experts move and get copies while sequences run, on this machine's node and one that is pretended: its memory is the first one's.

Real nodes are in tests/numa. Everything else is real: pages are migrated, copies made, workers told, killed and started again.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fault.harness import Decoding, config, descriptors, limit, signalled, wait_for
from tests.fault.test_placement import MISSING, two_nodes
from workers import numa
from workers.automatic_config import Automatic
from workers.lifecycle import State
from workers.numa import MemoryUse
from workers.rebalancing import BalanceReport
from workers.team import Team, TeamConfig

LOADS = [[1000.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 400.0]] * 64
"""The first expert is hot, and the last, which lies on the other node, is warm."""


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node MISSING is taken for node 0 in what the kernel is asked, and node 0's memory for its own."""
    call, use, pages = numa._call, numa.memory_use, numa.pages_elsewhere

    def ask(name: str, address: int | None, length: int | None, mode: int, node: int, *, flags: int = 0) -> tuple[str, int]:
        return call(name, address, length, mode, 0 if node == MISSING else node, flags=flags)

    def look(address: int, path: str = "/proc/self/numa_maps") -> MemoryUse | None:
        found = use(address, path)
        return None if found is None else MemoryUse(found.policy, {**found.bytes_on, MISSING: found.bytes_on.get(0, 0)})

    def count(address: int, length: int, page: int, node: int) -> tuple[int, int] | None:
        found = pages(address, length, page, 0 if node == MISSING else node)
        assert found is not None
        return found

    monkeypatch.setattr(numa, "_call", ask)
    monkeypatch.setattr(numa, "memory_use", look)
    monkeypatch.setattr(numa, "pages_elsewhere", count)


def loads(team: Team) -> list[list[float]]:
    info = team.model.info
    return [[LOADS[0][expert] if expert < 7 else LOADS[0][7] for expert in range(info.experts)] for _ in range(info.layers)]


@contextmanager
def placed(model: Path, *, workers: int = 1, settings: TeamConfig | None = None) -> Iterator[Team]:
    wish = replace(settings or config(workers), load_mode="memfd", placement="experts")
    with Team.open(model, wish, machine=two_nodes()) as team:
        yield team


@contextmanager
def meanwhile(work: Callable[[], BalanceReport]) -> Iterator[list[BalanceReport]]:
    """Runs it on a thread while the caller steps."""
    done: list[BalanceReport] = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    try:
        yield done
    finally:
        thread.join(limit(60))
        assert done, "rebalancing did not end or failed"


def copies_mapped(pid: int) -> int:
    """Copies of experts that a process has mapped."""
    return len(set(re.findall(r"memfd:colibri:expert-at-(\d+)", Path(f"/proc/{pid}/maps").read_text())))


def pids(team: Team) -> dict[int, int]:
    return {worker.node: worker.pid for worker in team.supervisor.snapshot().workers if worker.pid is not None}


def test_nothing_changes_but_where_experts_lie(model: Path, undisturbed: list[list[int]]) -> None:
    fds = descriptors()
    with placed(model) as team:
        before = team.balance()
        assert before.nodes == (0, MISSING)
        dry = team.rebalance(loads(team), dry_run=True, replicas=1, min_gain=0.0)
        assert dry.dry_run
        assert dry.plan.replicas
        assert team.balance() == before
        decoding = Decoding()
        with meanwhile(lambda: team.rebalance(loads(team), replicas=1, min_gain=0.0)) as done:
            assert decoding.run(team.session) == undisturbed
        (report,) = done
        assert report.refused == ""
        assert (report.moved, report.replicated) == (report.plan.moves, report.plan.replicas)
        assert team.balance().copies == report.plan.copies
        assert Decoding().run(team.session) == undisturbed
        for node, pid in pids(team).items():
            assert copies_mapped(pid) == sum(copy.node == node for copy in report.replicated)
        assert copies_mapped(os.getpid()) == sum(copy.node == team.plan.front_node for copy in report.replicated)
        assert not any("experts" in text for text in team.describe().degraded)
        again = team.rebalance(loads(team), replicas=1, min_gain=0.01)
        assert again.plan.empty, again.plan.reason
        back = team.rebalance(loads(team), replicas=0, min_gain=0.0)
        assert back.dropped
        assert back.refused == ""
        assert {node: copies_mapped(pid) for node, pid in pids(team).items()} == dict.fromkeys(pids(team), 0)
        assert Decoding().run(team.session) == undisturbed
    assert not set(descriptors()) - set(fds)


def test_worker_killed_while_experts_move_comes_back_with_what_there_is_then(model: Path, undisturbed: list[list[int]]) -> None:
    with placed(model) as team:
        decoding = Decoding()

        def strike(step: int) -> None:
            if step % 10 == 5:
                for worker in team.supervisor.snapshot().workers:
                    if worker.pid is not None and worker.state is State.READY:
                        signalled(worker.pid, signal.SIGKILL)

        def all_of_it() -> BalanceReport:
            reports = [team.rebalance(loads(team), replicas=count, min_gain=0.0) for count in (2, 0, 1)]
            assert not any(report.refused for report in reports), reports
            return reports[-1]

        with meanwhile(all_of_it):
            assert decoding.run(team.session, before_step=strike) == undisturbed
        wait_for(lambda: team.supervisor.snapshot().ready == 2, seconds=limit(20), what="both workers are back")
        places = team.balance()
        for node, pid in pids(team).items():
            assert copies_mapped(pid) == sum(node in at[1:] for layer in places.copies for at in layer)
        assert Decoding().run(team.session) == undisturbed


def test_scaling_while_experts_move(model: Path, undisturbed: list[list[int]]) -> None:
    with placed(model, settings=replace(config(1), session=replace(config(1).session, max_lanes=8))) as team:
        decoding = Decoding()

        def scale() -> BalanceReport:
            report = team.rebalance(loads(team), replicas=1, min_gain=0.0)
            team.scale(None, workers=2)
            mixed = team.rebalance(loads(team), replicas=2, min_gain=0.0)
            team.scale(None, workers=1)
            assert not report.refused
            assert not mixed.refused
            return report

        with meanwhile(scale):
            assert decoding.run(team.session) == undisturbed
        places = team.balance()
        for node, pid in pids(team).items():
            assert copies_mapped(pid) == sum(node in at[1:] for layer in places.copies for at in layer)


def test_refused_migration_changes_nothing_and_is_said_once(
    model: Path, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with placed(model) as team:
        monkeypatch.setattr(numa, "_call", lambda name, *_, **__: (f"{name} to NUMA node 1: Operation not permitted", errno.EPERM))
        before = team.balance()
        uneven = [[100.0, 90.0, 80.0, 70.0, 1.0, 1.0, 1.0, 1.0]] * team.model.info.layers
        for _ in range(3):
            report = team.rebalance([row[: team.model.info.experts] for row in uneven], min_gain=0.0)
            assert report.plan.moves
            assert "Operation not permitted" in report.refused
            assert not report.moved
        assert team.balance() == before
        assert [text for text in team.describe().degraded if "experts stay where they are" in text] == [
            f"experts stay where they are: {report.refused}"
        ]
        assert Decoding().run(team.session) == undisturbed
        assert sum("experts stay where they are" in record.message for record in caplog.records) == 1


def test_automatic_mode_follows_the_load(model: Path, undisturbed: list[list[int]]) -> None:
    counts = [[0.0] * 8 for _ in range(64)]

    def grow() -> list[list[float]]:
        for row in counts:
            for expert, load in enumerate(LOADS[0]):
                row[expert] += load
        return [row[: team.model.info.experts] for row in counts[: team.model.info.layers]]

    automatic = Automatic(interval_s=0.05, min_gain=0.01, replicas=1, loads=grow)
    team: Team
    with placed(model, settings=replace(config(1), rebalance="auto", automatic=automatic)) as team:
        wait_for(lambda: any(len(at) > 1 for layer in team.balance().copies for at in layer), seconds=limit(20), what="a copy was made")
        assert Decoding().run(team.session) == undisturbed


def test_one_node_says_so_in_a_sentence(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = replace(config(1), rebalance="auto", automatic=Automatic(interval_s=0.01))
    with caplog.at_level("INFO"), Team.open(model, settings) as team:
        report = team.rebalance(replicas=2)
        assert report.plan.reason == "one NUMA node: nothing to place"
        assert (report.plan.empty, report.refused) == (True, "")
        assert team.balance().fixed == report.plan.reason
        assert not any("place" in text for text in team.describe().degraded)
    assert [record.message for record in caplog.records if "rebalancing" in record.message] == [
        "automatic rebalancing has nothing to do: one NUMA node: nothing to place"
    ]


def test_moves_and_copies_hold_no_token_up(model: Path) -> None:
    """The median step while experts move, again and again, is about that of before. Of single steps nothing is asked: any machine has slow
    ones."""
    with placed(model) as team:

        def median(steps: int, going_on: Callable[[], bool] = lambda: False) -> float:
            times: list[float] = []
            stamps: list[float] = []
            while len(times) < steps or going_on():
                stamps.clear()
                Decoding().run(team.session, before_step=lambda _: stamps.append(time.perf_counter()))
                times += [later - at for at, later in pairwise(stamps)][1:]
            return statistics.median(times)

        def keep_moving() -> BalanceReport:
            for _ in range(6):
                team.rebalance(loads(team), replicas=1, min_gain=0.0)
                report = team.rebalance([row[::-1] for row in loads(team)], replicas=0, min_gain=0.0)
            return report

        before = median(300)
        thread = threading.Thread(target=keep_moving)
        thread.start()
        during = median(300, thread.is_alive)
        thread.join()
        assert during <= 1.5 * max(before, median(300)), f"{1e3 * during:.2f} ms, before {1e3 * before:.2f} ms"
