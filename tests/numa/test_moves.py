"""Experts that move to other nodes, or get copies there, while requests run: the kernel says where their pages are, and no bit changes."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from colibri.v1 import operator_pb2 as op
from engine_c import KV_BLOCK, Part, SeqWork, SessionOptions
from service.client import Client
from tests.numa.kernel import mappings, pages_of, share
from tests.numa.machine import Machine
from tests.numa.models import MODEL
from tests.numa.serving import PATIENCE, PROMPTS, Server, Streams, answer, served, until
from tests.numa.teams import Logits
from workers import numa
from workers.mapping import mapped
from workers.moving import RETRY_S, MoveError, move, range_of
from workers.rebalancing import BalanceReport
from workers.slot import SupervisorConfig
from workers.team import Team, TeamConfig

pytestmark = pytest.mark.numa("two-nodes", "four-nodes")

STREAMS = 4
STEPS = 10
BLOCKS = 4  # of KV, each stream
LEAST = 0.99  # of an expert's pages
HOT = [1000.0, 30.0, 20.0, 10.0, 10.0, 10.0, 10.0, 10.0]
DENY = f"exec {sys.executable} {Path(__file__).with_name('deny.py')}"


@contextmanager
def placed() -> Iterator[Team]:
    """A team of a worker a node, with whole experts on nodes."""
    config = TeamConfig(
        load_mode="memfd",
        placement="experts",
        workers_per_node=1,
        threads_per_worker=1,
        session=SessionOptions(max_rows=256, max_seqs=STREAMS, max_logit_rows=STREAMS, kv_blocks=STREAMS * BLOCKS),
        start_timeout_s=300.0,
        supervisor=SupervisorConfig(start_s=100.0),
    )
    with Team.open(MODEL, config) as opened:
        yield opened


def decode(team: Team, until_then: Callable[[int], bool] = lambda step: step < STEPS) -> list[Logits]:
    """Logits of every step of STREAMS greedy sequences, from their beginning again each STEPS steps."""
    found, step = [], 0
    work: list[SeqWork] = []
    while until_then(step):
        if step % STEPS == 0:
            blocks = [range(i * BLOCKS, (i + 1) * BLOCKS) for i in range(STREAMS)]
            work = [SeqWork(PROMPTS[i], 0, blocks[i], 1) for i in range(STREAMS)]
        results, _ = team.session.step(work)
        assert all(result.ok for result in results)
        found.append(team.session.logits())
        work = [SeqWork([r.rows[0].token], w.start + len(w.tokens), w.blocks, 1) for r, w in zip(results, work, strict=True)]
        step += 1
    assert (len(PROMPTS[3]) + STEPS) <= BLOCKS * KV_BLOCK
    return found


@pytest.fixture(scope="module")
def expected() -> list[Logits]:
    with placed() as team:
        return decode(team)


def while_decoding(team: Team, expected: list[Logits], work: Callable[[], object]) -> int:
    """Runs work on a thread while all streams decode, and a whole round beyond. Returns how many steps that took."""
    thread = threading.Thread(target=work)
    thread.start()
    ends: list[int] = []

    def going_on(step: int) -> bool:
        if not thread.is_alive() and not ends:
            ends.append((step // STEPS + 2) * STEPS)
        return not ends or step < ends[0]

    found = decode(team, going_on)
    thread.join()
    for step, logits in enumerate(found):
        assert np.array_equal(logits, expected[step % STEPS]), f"step {step}"
    return len(found)


def check_pages(team: Team) -> None:
    """Every expert of whole ones, and every copy, is where the team says, by the kernel's account in all processes."""
    layout = team.image.layout
    assert layout is not None
    places = team.balance()
    for experts, copies in zip(layout.layers, places.copies, strict=True):
        for expert, at in zip(experts, copies, strict=True):
            own = range_of(expert, team.image.bytes)
            fd = next(part.fd for part in team.image.base_parts(None) if part.offset <= own.offset < part.offset + part.bytes)
            assert share(pages_of(fd, [(own.offset, own.bytes)]), at[0]) >= LEAST, f"home {at[0]}"
            for node in at[1:]:
                copy = team.image.replicas[node][own.offset]
                assert share(pages_of(copy.fd, [(copy.offset, copy.bytes)]), node) >= LEAST, f"copy on {node}"
    for worker in team.supervisor.snapshot().workers:
        assert worker.pid is not None
        wanted = {own.offset for own in team.image.replicas.get(worker.node, {}).values()}
        assert copies_seen(worker.pid) == {(offset, worker.node) for offset in wanted}


def copies_seen(pid: int) -> set[tuple[int, int]]:
    """(offset, node) of the copies that a process has mapped; their pages in its page tables are on that node."""
    found = set()
    for mapping in mappings(pid).values():
        match = re.match(r"file=/memfd:colibri:expert-at-(\d+):node(\d+)", mapping.what)
        if match:
            found.add((int(match[1]), int(match[2])))
            assert set(mapping.pages) <= {int(match[2])}, mapping
    return found


def loads(team: Team) -> list[list[float]]:
    return [HOT] * team.model.info.layers


def test_hot_expert_is_moved_and_copied_while_four_streams_run(
    expected: list[Logits], machine: Machine, record_property: Callable[[str, object], None]
) -> None:
    with placed() as team:
        reports: list[BalanceReport] = []

        def work() -> None:
            beside = [[HOT[(expert + 1) % 8] for expert in range(8)]] * team.model.info.layers
            reports.append(team.rebalance(beside, min_gain=0.0))
            reports.append(team.rebalance(loads(team), replicas=len(machine.nodes) - 1, min_gain=0.0))

        steps = while_decoding(team, expected, work)
        moved, copied = reports
        assert moved.moved, moved.plan.reason
        assert copied.replicated, copied.plan.reason
        assert (moved.refused, copied.refused) == ("", "")
        assert all(len(layer[0]) == len(machine.nodes) for layer in team.balance().copies), "the hot expert is everywhere"
        check_pages(team)
        assert not any("expert" in text for text in team.describe().degraded)
        local = sum(lane.local for lane in team.describe().lanes) / sum(lane.homed for lane in team.describe().lanes)
        counts = f"{steps}, {len(moved.moved)}, {len(copied.replicated)}, {local:.0%}"
        record_property("steps meanwhile, moves, copies, tasks at home", counts)
        back = team.rebalance(loads(team), replicas=0, min_gain=0.0)
        assert len(back.dropped) == len(copied.replicated)
        check_pages(team)


def test_pages_held_for_a_moment_are_moved_all_the_same(machine: Machine) -> None:
    with held_pages() as (part, let_go):
        rests: list[float] = []

        def rest(seconds: float) -> None:
            rests.append(seconds)
            if seconds == RETRY_S and rests.count(RETRY_S) == 3:
                let_go()

        target = len(machine.nodes) - 1
        move([part], 0, target, rest=rest)
        assert rests.count(RETRY_S) == 3
        assert share(pages_of(part.fd, [(0, part.bytes)]), target) == 1.0


def test_pages_held_for_good_go_back_with_their_neighbours() -> None:
    with held_pages() as (part, _):
        with pytest.raises(MoveError, match="of 512 pages did not get to NUMA node 1"):
            move([part], 0, 1, rest=lambda _: None)
        assert share(pages_of(part.fd, [(0, part.bytes)]), 0) == 1.0


@contextmanager
def held_pages() -> Iterator[tuple[Part, Callable[[], object]]]:
    """Four MiB of small pages on node 0, a hundred of which a pipe holds, and what makes it let go of them."""
    fd = os.memfd_create("held")
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
    try:
        os.ftruncate(fd, 4 << 20)
        with mapped(fd, 4 << 20, writable=True) as base:
            assert numa.bind_memory(base, 4 << 20, 0) == ""
            os.pwrite(fd, bytes(4 << 20), 0)
        held = os.splice(fd, write, 100 * 4096, offset_src=0)
        assert held == 100 * 4096
        yield Part(fd, 0, 0, 4 << 20), lambda: os.read(read, held)
    finally:
        for opened in (fd, read, write):
            os.close(opened)


def test_workers_killed_and_stopped_meanwhile_come_back_with_what_there_is_then(expected: list[Logits]) -> None:
    with placed() as team:

        def strike(number: signal.Signals) -> None:
            for worker in team.supervisor.snapshot().workers:
                if worker.pid is not None:
                    os.kill(worker.pid, number)

        def work() -> None:
            for number in (signal.SIGKILL, signal.SIGSTOP):
                assert not team.rebalance([HOT[::-1]] * team.model.info.layers, replicas=0, min_gain=0.0).refused
                strike(number)  # right after a move, or before a copy is handed over
                assert not team.rebalance(loads(team), replicas=1, min_gain=0.0).refused

        while_decoding(team, expected, work)
        until(lambda: team.supervisor.snapshot().ready == len(team.plan.workers), "all are back")
        check_pages(team)


def test_served_streams_do_not_notice(expected: list[Logits], tmp_path: Path) -> None:
    with served(tmp_path, "--load memfd --placement experts --threads-per-worker 1") as server:
        with Client(server.target) as client:
            tokens = [answer(client, which, tokens=8) for which in range(STREAMS)]
        with Streams(server.target, tokens) as streams:
            streams.more()
            first = rebalance(server, replicas=2)
            streams.more()
            second = rebalance(server, replicas=0)
            streams.more()
        assert streams.failures == []
        assert first.done, first.reason
        assert first.copies
        assert second.done, second.reason


def rebalance(server: Server, *, replicas: int) -> op.RebalanceResponse:
    return server.operator.Rebalance(op.RebalanceRequest(replicas=replicas), timeout=PATIENCE)


def test_refused_migration_changes_nothing_and_is_said_once(tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    done = tmp_path / "done"
    command = f"{DENY.removeprefix('exec ')} {sys.executable} {script} {done}"
    assert os.system(f"cd {Path(__file__).parents[2]} && PYTHONPATH=. {command} 2> {tmp_path / 'log'}") == 0, (tmp_path / "log").read_text()
    refused, degraded = done.read_text().splitlines()
    assert "Operation not permitted" in refused
    assert degraded == f"experts stay where they are: {refused}"


REFUSED = """
import sys
from pathlib import Path
from tests.numa.test_moves import HOT, decode, placed
with placed() as team:
    before, places = decode(team), team.balance()
    load = [[HOT[(e + 1) % 8] for e in range(8)]] * team.model.info.layers
    for _ in range(2):
        report = team.rebalance(load, min_gain=0.0)
        assert report.plan.moves and not report.moved, report
    assert team.balance() == places
    assert all((a == b).all() for a, b in zip(before, decode(team)))
    told = [text for text in team.describe().degraded if text.startswith("experts stay")]
    Path(sys.argv[1]).write_text("\\n".join([report.refused, *told]) + "\\n")
"""
