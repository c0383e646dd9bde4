"""The weights are in memory once, however many processes compute with them."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Literal

import pytest

from ops.random_model import ModelShape, make_model
from tests.golden import harness
from workers.team import Team, TeamConfig

SHAPE = ModelShape(layers=4, hidden=512, heads=8, kv_heads=2, ffn=1536, experts=8, top_k=2, vocab=8000)
PROCESS = 60 << 20  # bytes a process may take for itself; the weights are more, so that a copy shows
PATIENCE = 30.0  # seconds


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "big.colibri"
    make_model(path, SHAPE, quant="int8", seed=1)
    assert path.stat().st_size > PROCESS * 5 // 4
    return path


@pytest.mark.parametrize("mode", ["map", "memfd"])
def test_four_workers_and_the_front_end_share_one_copy(mode: Literal["map", "memfd"], big_model: Path) -> None:
    options = harness.options(max_lanes=4)
    config = TeamConfig(load_mode=mode, workers_per_node=4, threads_per_worker=1, front_lane="on", session=options)
    with Team.open(big_model, config) as team:
        compute_until_all_have(team)
        workers = [worker.pid for worker in team.supervisor.snapshot().workers if worker.pid is not None]
        assert len(workers) == 4 * len({spec.node for spec in team.plan.workers})
        size = big_model.stat().st_size
        weights = {pid: weights_in(pid, big_model.name) for pid in (os.getpid(), *workers)}
        assert all(weights[pid]["Rss"] > size // 50 for pid in workers), "each reads weights through the mapping"
        assert sum(each["Pss"] for each in weights.values()) < size + (1 << 20)
        assert sum(each["Anonymous"] for each in weights.values()) == 0, "no page of it was copied"
        assert max(fields(Path(f"/proc/{pid}/smaps_rollup").read_text())["Anonymous"] for pid in workers) < PROCESS


def compute_until_all_have(team: Team) -> None:
    """Prompts until every lane has had a fair share of tasks: a lane may come late to a short one."""
    deadline = time.monotonic() + PATIENCE
    lanes = [lane for spec in team.plan.workers for lane in spec.lanes]
    while min(team.session.lane_tasks(lane) for lane in lanes) < 50:
        assert time.monotonic() < deadline, "a lane does not compute"
        harness.run(team.session, range(3, 103), chunk=25)


def weights_in(pid: int, name: str) -> dict[str, int]:
    """Bytes of the mappings of the model in a process, by kind: of the file or of a memfd, which is named after it."""
    total = {"Rss": 0, "Pss": 0, "Anonymous": 0}
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text()):
        if name in mapping.splitlines()[0]:
            found = fields(mapping)
            total = {kind: size + found[kind] for kind, size in total.items()}
    return total


def fields(text: str) -> dict[str, int]:
    """The kB lines of an smaps entry, in bytes."""
    return {name: int(value) << 10 for name, value in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
