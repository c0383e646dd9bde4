"""The judgement of routing policies end to end, on a model of random weights: what must hold whatever the policies do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_c import Damping
from ops.bench.balance import Wish, bench_balance
from ops.bench.balance_plot import draw_balance
from ops.bench.balance_report import read_balance
from ops.bench.balance_run import Judge
from ops.bench.balance_settings import GROUPS
from ops.bench.balance_stats import queues
from ops.bench.balance_traffic import Traffic, load_texts, make_traffic

SMALL = {"streams": 6, "steps": 48, "context": 32}
TEXTS = {
    "count": " ".join(str(number * 37 % 1009) for number in range(300)),
    "words": "the quick brown fox jumps over the lazy dog. " * 18 + "then it sleeps; nothing else is known of it. " * 12,
}
DAMPINGS = [Damping(policy, scope=scope, margin=5.0, capacity_factor=1.0) for policy, scope in GROUPS]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    for kind, text in TEXTS.items():
        (path / f"{kind}.txt").write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def traffic(tiny_model: Path, folder: Path) -> Traffic:
    return make_traffic("mixed", load_texts(tiny_model, folder), **SMALL)


@pytest.fixture(scope="module")
def judge(tiny_model: Path) -> Iterator[Judge]:
    with Judge.open(tiny_model, streams=SMALL["streams"], context=SMALL["context"]) as opened:
        yield opened


def name(damping: Damping) -> str:
    return f"{damping.kind}-{damping.scope}"


def test_without_a_policy_nothing_changes(judge: Judge, traffic: Traffic) -> None:
    found = judge.evaluate(traffic, None)
    assert (found.rerouted, found.moved, found.change.share, found.change.error) == (0, 0, 0, 0)
    assert found.queue == found.undamped
    assert (found.variance, found.longest_variance) == (0, 0)


def test_every_row_has_its_experts(judge: Judge, traffic: Traffic) -> None:
    for damping in [None, *DAMPINGS]:
        lengths = queues(judge.run(traffic, damping).experts, count=judge.model.info.experts)
        assert (lengths.sum(axis=2) == traffic.streams * judge.model.info.top_k).all()


@pytest.mark.parametrize("damping", DAMPINGS, ids=name)
def test_a_policy_changes_routes_and_counts_where(judge: Judge, traffic: Traffic, damping: Damping) -> None:
    found = judge.evaluate(traffic, damping)
    assert found.rerouted > 0
    assert found.moved > 0
    assert found.change.share != 0
    assert set(found.by_kind) == set(TEXTS)


@pytest.mark.parametrize("damping", DAMPINGS, ids=name)
@pytest.mark.parametrize("limit", [{"max_rerouted": 0.0}, {"margin": 0.0}], ids=lambda limit: next(iter(limit)))
def test_a_policy_that_may_do_nothing_changes_no_bit(judge: Judge, traffic: Traffic, damping: Damping, limit: dict[str, float]) -> None:
    outcome, base = judge.run(traffic, replace(damping, **limit)), judge.undamped(traffic)
    assert outcome.rerouted.sum() == 0
    assert (outcome.logprobs == base.logprobs).all()
    assert (outcome.experts == base.experts).all()


@pytest.mark.parametrize("damping", DAMPINGS, ids=name)
def test_no_more_is_rerouted_than_is_allowed(judge: Judge, traffic: Traffic, damping: Damping) -> None:
    assert judge.evaluate(traffic, replace(damping, max_rerouted=0.1)).rerouted <= 0.1


def test_capacity_of_the_mean_leaves_no_longer_queue(judge: Judge, traffic: Traffic) -> None:
    found = judge.evaluate(traffic, Damping("capacity", scope="batch", margin=1e6, capacity_factor=1.0))
    assert found.queue.longest_most == found.queue.mean == 3
    assert found.queue.variance == 0


def test_reuse_wakes_fewer_experts(judge: Judge, traffic: Traffic) -> None:
    found = judge.evaluate(traffic, Damping("reuse", scope="batch", margin=1e6))
    assert found.queue.active < found.undamped.active


@pytest.mark.parametrize("damping", [damping for damping in DAMPINGS if damping.scope == "sequence"], ids=name)
def test_scope_sequence_does_not_see_the_other_streams(judge: Judge, traffic: Traffic, damping: Damping) -> None:
    together = judge.run(traffic, damping)
    part = {field: getattr(traffic, field)[:, 2:4] for field in ("tokens", "targets", "positions", "excerpts", "kind")}
    apart = judge.run(replace(traffic, **part), damping)
    assert (apart.logprobs == together.logprobs[:, 2:4]).all()
    assert (apart.rerouted == together.rerouted[:, 2:4]).all()


def test_the_number_of_lanes_changes_nothing(tiny_model: Path, judge: Judge, traffic: Traffic) -> None:
    with Judge.open(tiny_model, streams=SMALL["streams"], context=SMALL["context"], lanes=2) as two:
        for damping in DAMPINGS:
            one, other = judge.run(traffic, damping), two.run(traffic, damping)
            assert (one.logprobs == other.logprobs).all()
            assert (one.experts == other.experts).all()


def test_a_whole_judgement_is_written_read_and_drawn(tiny_model: Path, folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    report = bench_balance(tiny_model, Wish(folder, settings=tuple(DAMPINGS), streams=6, steps=48, context=32), said.append)
    assert set(report.undamped) == {"mixed", "shifting", *TEXTS}
    assert all(set(case.judgements) == set(report.undamped) for case in report.cases)
    assert all(value > 1 for value in report.undamped.values())
    assert {row.setting for row in report.nodes} >= {"off"}
    assert all(row.replay.even >= 1 and row.replay.planned >= 1 for row in report.nodes)
    assert len(said) >= len(DAMPINGS) * len(report.undamped)

    written = tmp_path / "balance.json"
    written.write_text(report.as_json(), encoding="utf-8")
    again = read_balance(written)
    assert again.as_json() == report.as_json()
    pictures = draw_balance(again, tmp_path / "picture")
    assert np.all([picture.stat().st_size > 10_000 for picture in pictures])


def test_the_command_judges_and_names_what_it_cannot(tiny_model: Path, folder: Path) -> None:
    def bench(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ops.cli", "bench", "balance", str(tiny_model), "--texts", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)

    small = ("--streams", "4", "--steps", "24", "--context", "16")
    done = bench(*small, "--setting", "reuse,margin=2", "--traffic", "words", "--json")
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    assert case["setting"] == "reuse/batch,margin=2,max_rerouted=1"
    assert case["traffic"]["words"]["tokens"] == 4 * 24
    shown = bench(*small, "--setting", "capacity/sequence,margin=2", "--traffic", "mixed")
    assert "capacity/sequence" in shown.stdout
    (off,) = (line.split() for line in shown.stdout.splitlines() if line.split()[:1] == ["off"])
    assert len(off) == 6, "perplexity and queues without a policy, which the changes are measured by"
    assert float(off[1]) > 1
    for wrong, sentence in (
        (("--setting", "reuse/sequence"), "no reuse/sequence"),
        (("--setting", "heat/batch,warmth=3"), "heat/batch has no warmth"),
        (("--setting", "heat/batch,margin"), "is not NAME=NUMBER"),
        (("--traffic", "poems"), "no traffic 'poems'"),
        (("--policies", "cold"), "--policies cold"),
        (("--context", "4096"), "do not fit the model's context"),
    ):
        refused = bench(*wrong)
        assert refused.returncode != 0
        assert sentence in refused.stderr
