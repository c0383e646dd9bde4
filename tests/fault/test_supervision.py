"""Starting, stopping, changing the plan, and the death of the front end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine_c import EngineError, Model, Session
from tests.fault.harness import OPTIONS, PATIENCE, Decoding, alive, children, config, descriptors, wait_for
from workers import process
from workers.lifecycle import RestartPolicy, State
from workers.plan import NodeWish, plan_team
from workers.segments import ModelImage, open_image
from workers.slot import SupervisorConfig
from workers.supervisor import Supervisor, SupervisorError
from workers.team import Team
from workers.topology import read_topology

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def supervised(
    model: Path, workers: int, settings: SupervisorConfig | None = None, *, other: ModelImage | None = None
) -> Iterator[Supervisor]:
    """A session and a supervisor that has not been started; room for 16 lanes."""
    plan = plan_team(read_topology(), default=NodeWish(workers, 1))
    options = replace(OPTIONS, max_lanes=16)
    with open_image(model) as image, Model.from_fd(image.fds[0]) as opened, Session(opened, options) as session:
        supervisor = Supervisor(session, image if other is None else other, plan, settings)
        try:
            yield supervisor
        finally:
            supervisor.stop()


# ---------------------------------------------------------------- start


def test_a_start_takes_less_than_a_second_and_every_worker_is_attached(model: Path) -> None:
    began = time.monotonic()
    with Team.open(model, config(2, threads=2)) as team:
        assert time.monotonic() - began < 1.0 * PATIENCE
        snapshot = team.supervisor.snapshot()
        assert (snapshot.ready, snapshot.wanted) == (2, 2)
        assert [team.session.lane_state(lane) for lane in range(4)] == [1, 1, 1, 1]


def test_a_worker_has_no_descriptor_but_its_own_and_no_new_privileges(model: Path) -> None:
    with Team.open(model, config(1)) as team:
        pid = team.supervisor.snapshot().workers[0].pid
        assert pid is not None
        fds = {int(name): os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
        assert len(fds) == 4, fds  # stdin, stdout, stderr, control
        assert fds[0] == "/dev/null"
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
        assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(0))
        assert "numpy" not in Path(f"/proc/{pid}/maps").read_text()


def test_lanes_are_pinned_to_the_planned_cpus(model: Path) -> None:
    with Team.open(model, config(1)) as team:
        worker = team.supervisor.snapshot().workers[0]
        assert worker.pid is not None
        if not worker.cpus:
            assert len(team.topology.cpus_allowed) == 1, "an uncrowded plan pins every lane"
        threads = [os.sched_getaffinity(thread.id) for thread in psutil.Process(worker.pid).threads()]
        assert all({cpu} in threads for cpu in worker.cpus)


def test_a_worker_that_can_not_import_fails_the_start_with_its_last_words(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IMPORT_PATHS", ("/nonexistent",))
    with supervised(model, 2) as supervisor:
        with pytest.raises(SupervisorError, match=r"(?s)worker [01] .*exited with code 1; 3 starts in a row failed.*No module named"):
            supervisor.start(20)
        assert supervisor.snapshot().workers == ()
    assert children() == []


def test_a_worker_that_can_not_open_the_model_fails_the_start(model: Path) -> None:
    with (
        open_image("/proc/version") as wrong,
        supervised(model, 1, other=wrong) as supervisor,
        pytest.raises(SupervisorError, match=r"worker 0 \(NUMA node 0\) exited with code [34]"),
    ):
        supervisor.start(20)


def test_a_worker_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    from ops.random_model import SHAPES, make_model

    other = tmp_path / "other.colibri"
    make_model(other, SHAPES["tiny"])
    with open_image(other) as wrong, supervised(model, 1, other=wrong) as supervisor:
        with pytest.raises(SupervisorError, match=r"exited with code 3: its segments do not fit .*another model"):
            supervisor.start(20)
        assert supervisor.snapshot().workers == ()


def test_a_worker_that_hangs_while_starting_is_killed_and_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import time\nprint('about to hang', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(process, "MAIN", script)
    settings = SupervisorConfig(start_s=0.3, policy=RestartPolicy(boot_limit=2))
    sentence = r"(?s)worker 0 .*did not become ready within 0\.3 s.*about to hang"
    with supervised(model, 1, settings) as supervisor, pytest.raises(SupervisorError, match=sentence):
        supervisor.start(20)
    assert children() == []


def test_a_worker_stopped_while_starting_is_not_waited_for(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "stop.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    monkeypatch.setattr(process, "MAIN", script)
    settings = SupervisorConfig(stop_s=0.02, start_s=600, policy=RestartPolicy(boot_limit=2))
    with supervised(model, 1, settings) as supervisor, pytest.raises(SupervisorError, match=r"killed by SIGKILL \(it was stopped\)"):
        supervisor.start(20)
    assert children() == []


def test_a_start_that_takes_too_long_says_for_whom_it_waited(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(process, "MAIN", script)
    sentence = r"not ready after 0\.3 s: worker 0 \(NUMA node 0\) is starting"
    with supervised(model, 1) as supervisor, pytest.raises(SupervisorError, match=sentence):
        supervisor.start(0.3)
    assert children() == []


def test_a_worker_killed_while_starting_is_started_again(model: Path) -> None:
    with supervised(model, 1) as supervisor:
        done = threading.Event()

        def kill_the_first() -> None:
            while not done.is_set():
                for child in psutil.Process().children():
                    child.kill()
                    return

        thread = threading.Thread(target=kill_the_first)
        thread.start()
        try:
            supervisor.start(20)
        finally:
            done.set()
            thread.join()
        assert supervisor.snapshot().ready == 1


# ---------------------------------------------------------------- stop


@pytest.mark.parametrize("state", ["ready", "stopped", "killed", "starting"])
def test_stop_leaves_no_process_and_no_descriptor(state: str, model: Path) -> None:
    fds = descriptors()
    with supervised(model, 3) as supervisor:
        if state == "starting":
            with pytest.raises(SupervisorError, match=r"not ready after 0\.005 s"):
                supervisor.start(0.005)
        else:
            supervisor.start(20)
        for worker in supervisor.snapshot().workers:
            assert worker.pid is not None
            if state in ("stopped", "killed"):
                os.kill(worker.pid, signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
        began = time.monotonic()
        supervisor.stop()
        assert time.monotonic() - began < 2 * PATIENCE
        assert children() == []
        assert supervisor.snapshot().workers == ()
    assert not Counter(descriptors()) - Counter(fds), "nothing new; what others had open may go"


def test_stop_from_several_threads_and_twice_is_harmless(model: Path) -> None:
    with supervised(model, 2) as supervisor:
        supervisor.start(20)
        threads = [threading.Thread(target=supervisor.stop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        supervisor.stop()
        with pytest.raises(SupervisorError, match="started or stopped before"):
            supervisor.start(1)


def test_opening_a_broken_model_leaves_nothing(tmp_path: Path) -> None:
    fds = descriptors()
    broken = tmp_path / "broken.colibri"
    broken.write_bytes(b"COLIBRI\0" + bytes(4000))
    with pytest.raises(EngineError) as refusal:
        Team.open(broken)
    assert refusal.value.name == "EFORMAT"
    assert not Counter(descriptors()) - Counter(fds), "nothing new; what others had open may go"


# ---------------------------------------------------------------- another plan


def test_workers_come_and_go_while_decoding(model: Path, undisturbed: list[list[int]]) -> None:
    topology = read_topology()
    with supervised(model, 2) as supervisor:
        supervisor.start(20)
        session = supervisor.session
        sizes = iter([4, 1, 0, 3, 3, 2])

        def before_step(step: int) -> None:
            if step % 10 == 5:
                supervisor.set_plan(plan_team(topology, default=NodeWish(next(sizes), 1)))
                if step % 20 == 5:
                    supervisor.wait_ready(20)

        assert Decoding().run(session, before_step=before_step) == undisturbed
        supervisor.wait_ready(20)
        assert [worker.state for worker in supervisor.snapshot().workers] == [State.READY] * 2
        assert len(children()) == 2


def test_lanes_that_change_hands_are_handed_over(model: Path, undisturbed: list[list[int]]) -> None:
    """1 worker with 4 lanes, then 4 workers with one of them each: nobody binds a lane that is still in use."""
    topology = read_topology()
    with supervised(model, 1) as supervisor:
        supervisor.start(20)
        session = supervisor.session
        for workers, threads in [(1, 4), (4, 1), (2, 2)]:
            supervisor.set_plan(plan_team(topology, default=NodeWish(workers, threads)))
            assert Decoding().run(session) == undisturbed
            supervisor.wait_ready(20)
            assert len(children()) == workers
        assert [worker.restarts for worker in supervisor.snapshot().workers] == [0, 0]


# ---------------------------------------------------------------- the front end dies

FRONT_END = """
import os, signal, sys
from pathlib import Path
from tests.fault.harness import Decoding, config
from workers.team import Team

team = Team.open(Path(sys.argv[1]), config(3))
pids = [worker.pid for worker in team.supervisor.snapshot().workers]
if sys.argv[2] == "stopped":
    os.kill(pids[0], signal.SIGSTOP)
print(*pids, flush=True)
while sys.argv[2] == "busy":
    Decoding().run(team.session)
if sys.argv[2] == "exit":
    sys.exit(0)
signal.pause()
"""


@pytest.mark.parametrize("state", ["idle", "busy", "stopped", "exit"])
def test_no_worker_outlives_the_front_end_by_two_seconds(state: str, model: Path) -> None:
    """SIGKILL of an idle and of a computing front end, one with a stopped worker, and one that exits without closing its team."""
    front_end = subprocess.Popen([sys.executable, "-c", FRONT_END, str(model), state], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with front_end:
        assert front_end.stdout is not None
        pids = [int(word) for word in front_end.stdout.readline().split()]
        assert len(pids) == 3
        if state != "exit":
            assert alive(pids) == pids
            front_end.kill()
        wait_for(lambda: not alive(pids), seconds=2, what="all workers gone")
