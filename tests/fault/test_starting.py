"""Workers start while the model is still being copied: what befalls either meanwhile."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine_c import EngineError
from engine_c.fill import fill
from ops.random_model import SHAPES, make_model
from service.config import ConfigError, ServeConfig
from service.node import agent
from service.node.config import NodeConfig
from service.opening import begin_opening
from service.server import Server
from tests.fault.harness import PATIENCE, Decoding, children, config, descriptors, wait_for
from workers import filling
from workers.layout import Layout
from workers.mapping import HUGE_PAGE
from workers.segments import SegmentError
from workers.team import Team, TeamConfig

COPIED = replace(config(2), load_mode="memfd")


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Has the copy stop behind the first piece, which holds the model's header, until both workers run and what is given has been done."""

    def hold(act: Callable[[], None]) -> None:
        once, done = threading.Lock(), threading.Event()

        def held(file: int, address: int, begin: int, end: int) -> int:
            if begin and once.acquire(blocking=False):
                wait_for(lambda: len(children()) == 2, seconds=10, what="two workers while the copy is made")
                act()
                done.set()
            if begin:
                assert done.wait(20 * PATIENCE)
            return fill(file, address, begin, end)

        monkeypatch.setattr(filling, "PIECE", HUGE_PAGE)
        monkeypatch.setattr(filling, "fill", held)

    return hold


def open_team(path: Path, settings: TeamConfig = COPIED) -> Team:
    return Team.open(path, settings)


def test_workers_are_there_before_the_copy_is_whole_and_compute_the_same(
    model: Path, undisturbed: list[list[int]], copying: Callable[[Callable[[], None]], None]
) -> None:
    early: list[list[str]] = []
    copying(lambda: early.append(children()))
    with open_team(model) as team:
        assert len(early[0]) == 2
        assert team.image.pending == 0
        assert Decoding().run(team.session) == undisturbed
        assert team.supervisor.snapshot().restarts == 0


def test_a_worker_that_dies_before_the_model_is_there_is_started_again(
    model: Path, undisturbed: list[list[int]], copying: Callable[[Callable[[], None]], None]
) -> None:
    def kill_one() -> None:
        psutil.Process().children()[0].send_signal(signal.SIGKILL)

    copying(kill_one)
    with open_team(model) as team:
        assert (team.supervisor.snapshot().ready, team.supervisor.snapshot().restarts) == (2, 1)
        assert Decoding().run(team.session) == undisturbed


def test_a_file_that_is_cut_short_under_the_copy_leaves_no_worker_and_no_descriptor(
    model: Path, tmp_path: Path, copying: Callable[[Callable[[], None]], None]
) -> None:
    path = tmp_path / "model.colibri"
    shutil.copyfile(model, path)
    before = descriptors()
    copying(lambda: os.truncate(path, HUGE_PAGE))
    with pytest.raises(SegmentError, match=rf"{path}: the file became shorter while it was read"):
        open_team(path)
    assert children() == []
    assert descriptors() == before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("colibri-fill")] == []


def test_a_damaged_header_is_refused_before_any_worker_is_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.colibri"
    shutil.copyfile(model, path)
    with path.open("r+b") as file:
        file.seek(70)
        file.write(b"\0\0\0\0")
    monkeypatch.setattr(filling, "PIECE", HUGE_PAGE)
    before = descriptors()
    with pytest.raises(EngineError, match="descriptor"):
        open_team(path)
    assert children() == []
    assert descriptors() == before


def test_a_model_that_another_is_renamed_over_while_it_is_opened_is_refused(model: Path, tmp_path: Path) -> None:
    """Name and tokenizer of one model never come together with the weights of another."""
    path = tmp_path / "model.colibri"
    shutil.copy(model, path)
    settings = ServeConfig(model=path, port=0, workers_per_node=1, threads_per_worker=1, operator_socket=str(tmp_path / "o.sock"))
    opening = begin_opening(settings)
    opening.result(PATIENCE)
    make_model(tmp_path / "other.colibri", SHAPES["tiny"], quant="int4", seed=9)
    os.replace(tmp_path / "other.colibri", path)
    before = descriptors()
    with pytest.raises(ConfigError, match="another file took its name while it was being opened"):
        asyncio.run(Server(settings, opening).startup())
    assert children() == []
    assert len(descriptors()) <= len(before)


def test_so_is_a_node_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "model.colibri", tmp_path / "other.colibri"
    for seed, made in enumerate((path, other)):
        make_model(made, SHAPES["tiny"], quant="int4", seed=seed)
    read = agent._read_layout

    def read_and_replace(settings: NodeConfig) -> Layout:
        found = read(settings)
        os.replace(other, path)
        return found

    monkeypatch.setattr(agent, "_read_layout", read_and_replace)
    with pytest.raises(ConfigError, match="another file took its name while it was being opened"):
        agent.Agent(NodeConfig(model=path, share="1/1", workers_per_node=1, threads_per_worker=1))
    assert children() == []
