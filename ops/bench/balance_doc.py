"""Writes docs/balance.md from reports: `python -m ops.bench.balance_doc > docs/balance.md`; its picture: `--picture docs/images/balance`.

    colibri bench balance MODEL --texts FOLDER --json > docs/data/balance-judged-all.json      (or policy by policy)
    colibri bench balance-speed MODEL --texts FOLDER --json > docs/data/balance-speed-tiny.json
    colibri bench balance-speed MODEL --json > docs/data/balance-speed-mm-int4.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ops.bench.balance_doc_text import BEFORE, COMMANDS, JUDGED, NODES, POLICIES, SPEED
from ops.bench.balance_report import LIMITS, BalanceReport, Case, both, cost, merge, read_balance
from ops.bench.balance_settings import numbers_of, read_setting, write_setting
from ops.bench.balance_speed_report import OFF, SpeedReport, SpeedRow, read_speed
from ops.bench.balance_traffic import MIXED, SHIFTING

DATA = Path(__file__).parents[2] / "docs" / "data"
JUDGED_FILES = "balance-judged-*.json"
SPEEDS = "balance-speed-*.json"
GOAL = 0.68
"""How much lower variances were wanted."""


def document(folder: Path = DATA) -> str:
    """The whole text. BenchError, OSError."""
    report = judged(folder)
    speeds = [read_speed(path) for path in sorted(folder.glob(SPEEDS))]
    found = [*_recommended(report), *_reuse(report, speeds), *_best(report), *_by_traffic(report), *_nodes(report), *_speeds(speeds)]
    return "\n".join([BEFORE, POLICIES, JUDGED, *_where(report), *found, COMMANDS])


def judged(folder: Path = DATA) -> BalanceReport:
    """All judgements of a folder. BenchError, OSError."""
    return merge([read_balance(path) for path in sorted(folder.glob(JUDGED_FILES))])


def _where(report: BalanceReport) -> Iterator[str]:
    machine = report.machine
    texts = ", ".join(f"{kind} {count:,}" for kind, count in report.tokens.items())
    sizes = f"{report.streams} streams, up to {report.steps:,} steps, excerpts of {report.context} tokens"
    commit = f"commit {machine.commit or 'unknown'}"
    yield f"Figures below: `{report.model}`, {sizes}, {commit}. Tokens of the held-out texts: {texts}."
    yield f"\n    colibri bench balance ops/tiny/{report.model} --texts ops/tiny/texts --steps {report.steps} --json\n"
    perplexities = ", ".join(f"{name} {value:.2f}" for name, value in report.undamped.items())
    yield f"Perplexity without a policy: {perplexities}. None of these depends on the machine; times do, and name it.\n"


def _first(report: BalanceReport) -> str:
    return next(iter(report.undamped))


def chosen_cases(report: BalanceReport, limit: float) -> list[tuple[str, Case | None]]:
    """The best setting of each policy and scope within a limit."""
    cases = {write_setting(case.damping): case for case in report.cases}
    return [(group, cases[setting] if (setting := own[f"{limit:g}"]) else None) for group, own in report.chosen.items()]


def _name(group: str) -> str:
    return group.replace("/", ", ")


def _numbers(case: Case) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in numbers_of(case.damping).items())


# ---------------------------------------------------------------- what follows


def _recommended(report: BalanceReport) -> Iterator[str]:
    first, limit = _first(report), LIMITS[0]
    yield "## Recommended\n"
    yield f"For experts spread over nodes, losing at most {limit:.1%} on {first} traffic (variance of queues; of the longest queue):\n"
    aims: dict[str, Callable[[Case, str], float]] = {"both": both, "variance of queues": _queues, "of the longest queue": _longest}
    for what, measure in aims.items():
        for scope in ("batch", "sequence"):
            able = [(measure(case, first), case) for case in _evening(report, scope) if cost(case, first) <= limit]
            least, best = min(able, key=lambda pair: pair[0], default=(0.0, None))
            yield f"- {what}, scope {scope}: {_found(best, first) if best and least < 0 else 'nothing lowers it'}"
    yield from _two_thirds(report)


def _queues(case: Case, traffic: str) -> float:
    return case.judgements[traffic].variance


def _longest(case: Case, traffic: str) -> float:
    return case.judgements[traffic].longest_variance


def _evening(report: BalanceReport, scope: str) -> list[Case]:
    return [case for case in report.cases if case.damping.scope == scope and case.damping.kind != "reuse"]


def _found(case: Case, traffic: str) -> str:
    found = case.judgements[traffic]
    loss = f"{found.change.share:+.2%} ± {found.change.error:.2%}"
    return f"`{case.damping.kind}`, {_numbers(case)}: {found.variance:+.0%}; {found.longest_variance:+.0%}; perplexity {loss}"


def _two_thirds(report: BalanceReport) -> Iterator[str]:
    """What it takes to have both variances GOAL lower, by scope."""
    first = _first(report)
    for scope in ("batch", "sequence"):
        cases = _evening(report, scope)
        if able := [case for case in cases if both(case, first) <= -GOAL]:
            how = _found(min(able, key=lambda case: cost(case, first)), first)
        else:
            least = max((-case.judgements[first].variance for case in cases), default=0.0)
            how = f"no setting; whatever the loss, the variance of queues falls by {least:.0%} at most"
        yield f"- both lower by {GOAL:.0%} at least, at any loss, scope {scope}: {how}"
    yield ""


def _reuse(report: BalanceReport, speeds: Sequence[SpeedReport]) -> Iterator[str]:
    """Whether reuse is worth it: the gain in time where as many fewer experts are in use as the loss allows."""
    case = dict(chosen_cases(report, LIMITS[0])).get("reuse/batch")
    if case is None:
        yield f"`reuse` is not recommended: no setting keeps the loss within {LIMITS[0]:.1%}.\n"
        return
    found = case.judgements[_first(report)]
    fewer = found.queue.active / found.undamped.active
    likes = [(speed.model, row) for speed in speeds if (row := _like(speed, fewer)) is not None]
    gains = [f"{_against(row)} tokens/s with `{model}`" for model, row in likes]
    real = any(row.low > 1 for _, row in likes)
    yield (
        f"`reuse` ({_numbers(case)}): experts in use {fewer - 1:+.0%}, perplexity {found.change.share:+.2%} ± {found.change.error:.2%}. "
        f"Where about as many fewer were in use, that gave {'; '.join(gains) or 'nothing that was measured'}. "
        + ("Worth trying where weights do not fit the caches.\n" if real else "Not recommended: the gain is not above the scatter.\n")
    )


def _like(speed: SpeedReport, fewer: float) -> SpeedRow | None:
    """The setting of reuse that left most nearly that share of experts in use."""
    off = next(row.active for row in speed.rows if row.setting == OFF)
    rows = [row for row in speed.rows if row.setting.startswith("reuse")]
    return min(rows, key=lambda row: abs(row.active / off - fewer), default=None)


# ---------------------------------------------------------------- tables


def _best(report: BalanceReport) -> Iterator[str]:
    first = _first(report)
    yield f"## The best of each policy on {first} traffic\n"
    yield "![what evenness costs](images/balance.png)\n"
    yield "| at most | policy, scope | numbers | perplexity | rerouted | queues: variance | longest | its variance | experts in use |"
    yield "|---|---|---|---|---|---|---|---|---|"
    undamped = report.cases[0].judgements[first].undamped
    longest = f"{undamped.longest:.2f}, at most {undamped.longest_most}"
    yield f"| | none | | | | {undamped.variance:.2f} | {longest} | {undamped.longest_variance:.2f} | {undamped.active:.2f} |"
    for limit in LIMITS:
        for group, case in chosen_cases(report, limit):
            head = f"| +{limit:.1%} | {_name(group)} "
            yield head + (f"| {_numbers(case)} | {_cells(case, first)} |" if case else "| nothing | | | | | | |")
    yield ""


def _cells(case: Case, traffic: str) -> str:
    found, queue = case.judgements[traffic], case.judgements[traffic].queue
    cells = [f"{found.change.share:+.2%} ± {found.change.error:.2%}", f"{found.rerouted:.1%}"]
    cells += [f"{queue.variance:.2f} ({found.variance:+.0%})", f"{queue.longest:.2f}, at most {queue.longest_most}"]
    return " | ".join([*cells, f"{queue.longest_variance:.2f} ({found.longest_variance:+.0%})", f"{queue.active:.2f}"])


def _by_traffic(report: BalanceReport) -> Iterator[str]:
    yield "## The same settings on every kind of traffic\n"
    yield f"Those within {LIMITS[0]:.1%}: perplexity; variance of queues; of the longest queue. With reuse: perplexity; experts in use.\n"
    yield "| policy, scope | " + " | ".join(report.undamped) + " |"
    yield "|---|" + "---|" * len(report.undamped)
    for group, case in chosen_cases(report, LIMITS[0]):
        if case is not None:
            yield f"| {_name(group)} | " + " | ".join(_short(case, name) for name in report.undamped) + " |"
    yield ""


def _short(case: Case, traffic: str) -> str:
    found = case.judgements.get(traffic)
    if found is None:
        return ""
    what = f"{found.variance:+.0%}; {found.longest_variance:+.0%}"
    if case.damping.kind == "reuse":
        what = f"{found.queue.active / found.undamped.active - 1:+.0%}"
    return f"{found.change.share:+.2%} ± {found.change.error:.2%}; {what}"


def _nodes(report: BalanceReport) -> Iterator[str]:
    columns = sorted({(row.replay.nodes, row.replay.replicas) for row in report.nodes})
    sizes = sorted({nodes for nodes, _ in columns})
    heads = [f"{nodes} nodes, even" for nodes in sizes]
    heads += [f"{nodes} nodes, planned" + (f", {copies} copied" if copies else "") for nodes, copies in columns]
    yield NODES
    yield f"| traffic | policy | {' | '.join(heads)} |"
    yield "|---|---|" + "---|" * len(heads)
    for traffic in (MIXED, SHIFTING):
        for setting in dict.fromkeys(row.setting for row in report.nodes):
            rows = [row.replay for row in report.nodes if (row.setting, row.traffic) == (setting, traffic)]
            found = {(replay.nodes, replay.replicas): replay for replay in rows}
            if found:
                even = [next(f"{replay.even:.2f}" for replay in rows if replay.nodes == nodes) for nodes in sizes]
                planned = [f"{found[key].planned:.2f}" for key in columns]
                yield f"| {traffic} | {_policy(setting)} | {' | '.join([*even, *planned])} |"
    yield ""


def _policy(setting: str) -> str:
    if setting == OFF:
        return "none"
    damping = read_setting(setting)
    return f"{damping.kind}, {damping.scope}"


def _speeds(speeds: Sequence[SpeedReport]) -> Iterator[str]:
    yield SPEED
    for speed in speeds:
        yield f"`{speed.model}`, {speed.machine}:\n"
        yield "| policy | tokens/s | against none: median (quartiles) | router, µs a step | more, % of a step | experts in use |"
        yield "|---|---|---|---|---|---|"
        for row in speed.rows:
            against = "" if row.setting == OFF else _against(row)
            name = "none" if row.setting == OFF else f"{_policy(row.setting)}: {row.setting.partition(',')[2].replace(',', ', ')}"
            yield f"| {name} | {row.tokens_s:,.0f} | {against} | {row.router_us:.1f} | {row.router_cost:+.2f} | {row.active:.2f} |"
        yield ""


def _against(row: SpeedRow) -> str:
    return f"{row.ratio - 1:+.1%} ({row.low - 1:+.1%} to {row.high - 1:+.1%})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--picture"]:
        from ops.bench.balance_plot import draw_balance

        for written in draw_balance(judged(), Path(sys.argv[2])):
            print(written)
    else:
        sys.stdout.write(document())
