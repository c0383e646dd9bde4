"""docs/balance.md is what the reports beside it say, and says it right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine_c import Damping
from ops.bench.balance_doc import DATA, document, judged
from ops.bench.balance_nodes import Replay
from ops.bench.balance_report import LIMITS, BalanceReport, Case, NodeRow, front, merge, read_balance, score
from ops.bench.balance_run import Judgement
from ops.bench.balance_settings import GROUPS, numbers_of, read_setting, recommended, sweep, write_setting
from ops.bench.balance_speed_report import read_speed
from ops.bench.balance_stats import Change, QueueStats
from ops.bench.measure import BenchError, Machine

UNDAMPED = QueueStats(4.0, 5.0, 7.5, 2.0, 14, 7.5)


def judgement(*, loss: float, left: float, active: float = 7.5) -> Judgement:
    """So much more perplexity, and so much left of both variances."""
    change = Change(loss, 0.001)
    queue = replace(UNDAMPED, variance=5.0 * left, longest_variance=2.0 * left, active=active)
    return Judgement("mixed", 1000, 20.0, change, {"a": change}, 0.1, 0.05, queue, UNDAMPED, 1.0)


def case(setting: str, **found: float) -> Case:
    return Case(read_setting(setting), {"mixed": judgement(**found)})


GOOD = case("heat/batch,growth=1.2", loss=0.004, left=0.25)
BETTER = case("heat/batch,growth=1.4", loss=0.008, left=0.2)
WORSE = case("heat/batch,growth=1.3", loss=0.009, left=0.3)
REUSE = case("reuse/batch,margin=0.5", loss=0.002, left=1.4, active=6.0)


def report(*cases: Case, **chosen: dict[str, str | None]) -> BalanceReport:
    machine = Machine("CPU", 2, 8.0, "6.1", "avx2", "abc")
    nodes = (NodeRow("off", "mixed", Replay(2, 0, 1.3, 1.2, 3, 100)),)
    found = {group.replace("_", "/"): own for group, own in chosen.items()}
    sizes = {"streams": 16, "steps": 64, "context": 32}
    return BalanceReport(
        model="m", machine=machine, **sizes, tokens={"a": 9}, undamped={"mixed": 19.0}, cases=cases, chosen=found, nodes=nodes
    )


HEAT = report(GOOD, BETTER, WORSE, heat_batch={"0.005": write_setting(GOOD.damping), "0.01": write_setting(BETTER.damping)})
ACTIVE = report(REUSE, reuse_batch={"0.005": write_setting(REUSE.damping), "0.01": write_setting(REUSE.damping)})


def test_the_document_is_current() -> None:
    written = (DATA.parent / "balance.md").read_text(encoding="utf-8")
    assert written == document(), "run: python -m ops.bench.balance_doc > docs/balance.md"


def test_what_is_recommended_keeps_within_the_limit_and_nothing_chosen_is_beaten() -> None:
    whole = judged()
    first = next(iter(whole.undamped))
    for group, own in whole.chosen.items():
        cases = [one for one in whole.cases if "/".join(one.group) == group]
        for limit, setting in own.items():
            able = [one for one in cases if one.judgements[first].change.share <= float(limit) and score(one, first) < 0]
            assert (setting is None) == (not able)
            if able:
                assert setting == write_setting(min(able, key=lambda one: score(one, first)).damping)


def test_what_the_service_takes_by_itself_keeps_within_the_smaller_limit() -> None:
    whole = judged()
    first = next(iter(whole.undamped))
    losses = {write_setting(one.damping): one.judgements[first].change.share for one in whole.cases}
    for damping in recommended():
        assert losses[write_setting(damping)] <= LIMITS[0]


def test_settings_that_another_beats_are_not_on_the_front() -> None:
    assert front([WORSE, BETTER, GOOD], "mixed") == [GOOD, BETTER]


def test_reports_of_other_policies_are_merged_and_others_refused(tmp_path: Path) -> None:
    both = merge([HEAT, ACTIVE])
    assert set(both.chosen) == {"heat/batch", "reuse/batch"}
    assert len(both.cases) == 4
    assert both.nodes == HEAT.nodes
    path = tmp_path / "one.json"
    path.write_text(both.as_json(), encoding="utf-8")
    assert read_balance(path) == both
    with pytest.raises(BenchError, match="their steps differ, 64 and 32"):
        merge([HEAT, replace(ACTIVE, steps=32)])


def speed(path: Path, *, low: float) -> None:
    def row(case: str, ratio: float, active: float) -> dict[str, object]:
        details = {"x off": ratio, "from": ratio * low, "to": ratio * 1.1, "router us": 3.0, "router +%": 0.2, "active": active}
        return {"case": case, "median": 100.0, "details": details}

    machine = {"cpu": "CPU", "cores": 2, "isa": "avx2", "commit": "abc"}
    rows = [row("off", 1.0, 8.0), row("reuse/batch,margin=1", 1.1, 6.4), row("reuse/batch,margin=9", 1.9, 2.0)]
    path.write_text(json.dumps({"model": "big.colibri", "machine": machine, "rows": rows}), encoding="utf-8")


def test_the_verdict_on_reuse_follows_from_the_gain_with_as_many_experts(tmp_path: Path) -> None:
    (tmp_path / "balance-judged-a.json").write_text(ACTIVE.as_json(), encoding="utf-8")
    speed(tmp_path / "balance-speed-a.json", low=0.99)
    text = document(tmp_path)
    assert "experts in use -20%, perplexity +0.20% ± 0.10%" in text
    assert "+10.0% (+8.9% to +21.0%) tokens/s with `big.colibri`. Worth trying" in text
    speed(tmp_path / "balance-speed-a.json", low=0.8)
    assert "Not recommended: the gain is not above the scatter." in document(tmp_path)
    assert "scope sequence: nothing lowers it" in text


def test_what_is_wanted_is_said_to_be_had_at_the_least_loss_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "balance-judged-a.json").write_text(HEAT.as_json(), encoding="utf-8")
    text = document(tmp_path)
    assert "- both, scope batch: `heat`, growth 1.2, margin 2, max_rerouted 1: -75%; -75%; perplexity +0.40% ± 0.10%" in text
    assert "- both lower by 68% at least, at any loss, scope batch: `heat`, growth 1.2," in text
    assert "at any loss, scope sequence: no setting" in text


@pytest.mark.parametrize("group", GROUPS, ids="/".join)
def test_settings_are_read_as_they_are_written(group: tuple[str, str]) -> None:
    tried = sweep(*group)
    assert len(set(tried)) == len(tried)
    for damping in tried:
        again = read_setting(write_setting(damping))
        assert numbers_of(again) == numbers_of(damping)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cold/batch", "no cold/batch"),
        ("heat/batch,decay=0.5", "heat/batch has no decay"),
        ("reuse,margin=x", "'margin=x' is not NAME=NUMBER"),
        ("reuse,margin=-1", "margin is -1"),
    ],
)
def test_a_setting_that_is_none_is_named(text: str, sentence: str) -> None:
    with pytest.raises(BenchError, match=sentence):
        read_setting(text)


def test_a_scope_that_is_not_named_is_the_batch() -> None:
    assert read_setting("capacity,margin=2") == Damping("capacity", scope="batch", margin=2)


def test_files_that_are_no_reports_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(BenchError, match="no report of `colibri bench balance --json`"):
        read_balance(path)
    with pytest.raises(BenchError, match="no report of `colibri bench balance-speed --json`"):
        read_speed(path)
    with pytest.raises(BenchError, match="no report to read"):
        document(tmp_path)
