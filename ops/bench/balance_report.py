"""What a judgement found: to JSON and back, as tables, and which settings are worth having."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_c import Damping
from ops.bench.balance_nodes import Replay
from ops.bench.balance_run import Judgement
from ops.bench.balance_settings import numbers_of, read_setting, write_setting
from ops.bench.balance_stats import Change, QueueStats
from ops.bench.measure import BenchError, Machine

if TYPE_CHECKING:
    from rich.table import Table

LIMITS = (0.005, 0.01)
"""Losses of perplexity that the best setting is asked for."""


@dataclass(slots=True)
class Case:
    """A setting, and what it did by traffic."""

    damping: Damping
    judgements: dict[str, Judgement] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, str]:
        return self.damping.kind, self.damping.scope

    def as_dict(self) -> dict[str, object]:
        """What goes into JSON."""
        head = {"setting": write_setting(self.damping), "policy": self.damping.kind, "scope": self.damping.scope}
        return {**head, "numbers": numbers_of(self.damping), "traffic": {name: asdict(found) for name, found in self.judgements.items()}}


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A replay of one traffic, undamped ("off") or under a setting."""

    setting: str
    traffic: str
    replay: Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceReport:
    """One run."""

    model: str
    machine: Machine
    streams: int
    steps: int
    context: int
    tokens: dict[str, int]  # of each text
    undamped: dict[str, float]  # perplexity by traffic
    cases: tuple[Case, ...]
    chosen: dict[str, dict[str, str | None]]  # group "capacity/batch": setting by limit "0.005"
    nodes: tuple[NodeRow, ...]

    def as_json(self) -> str:
        """One JSON object."""
        whole: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        whole["machine"] = asdict(self.machine)
        whole["cases"] = [case.as_dict() for case in self.cases]
        whole["nodes"] = [asdict(row) for row in self.nodes]
        return json.dumps({"bench": "balance", **whole})

    def tables(self) -> list[Table]:
        """For people: one a traffic."""
        return [_table(name, self.cases, perplexity) for name, perplexity in self.undamped.items()]


def read_balance(path: Path) -> BalanceReport:
    """What as_json wrote. BenchError."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(whole, dict) or whole.pop("bench", None) != "balance":
            raise BenchError(f"{path} is no report of `colibri bench balance --json`")
        whole["machine"] = Machine(**whole["machine"])
        whole["cases"] = tuple(_case(case) for case in whole["cases"])
        whole["nodes"] = tuple(NodeRow(row["setting"], row["traffic"], Replay(**row["replay"])) for row in whole["nodes"])
        return BalanceReport(**whole)
    except (ValueError, KeyError, TypeError) as cause:
        raise BenchError(f"{path} is damaged or of another version ({cause}); write it with `colibri bench balance ... --json`") from cause


def merge(reports: Sequence[BalanceReport]) -> BalanceReport:
    """Of runs that differ in their policies only. BenchError if they do not belong together."""
    if not reports:
        raise BenchError("there is no report to read")
    first = reports[0]
    for other in reports[1:]:
        for name in ("model", "streams", "steps", "context", "tokens", "undamped"):
            if getattr(other, name) != getattr(first, name):
                both = f"{getattr(first, name)} and {getattr(other, name)}"
                raise BenchError(f"the reports do not belong together: their {name} differ, {both}")
    return replace(
        first,
        cases=tuple(case for report in reports for case in report.cases),
        chosen={group: own for report in reports for group, own in report.chosen.items()},
        nodes=tuple(dict.fromkeys(row for report in reports for row in report.nodes)),
    )


def _case(fields: dict[str, Any]) -> Case:
    return Case(read_setting(fields["setting"]), {name: _judgement(found) for name, found in fields["traffic"].items()})


def _judgement(fields: dict[str, Any]) -> Judgement:
    by_kind = {kind: Change(**found) for kind, found in fields["by_kind"].items()}
    parts = {"change": Change(**fields["change"]), "by_kind": by_kind}
    queue_parts = {name: QueueStats(**fields[name]) for name in ("queue", "undamped")}
    return Judgement(**{**fields, **parts, **queue_parts})


def by_group(cases: Iterable[Case]) -> dict[tuple[str, str], list[Case]]:
    """Cases by (policy, scope)."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        found.setdefault(case.group, []).append(case)
    return found


def cost(case: Case, traffic: str) -> float:
    """What it loses in perplexity."""
    return case.judgements[traffic].change.share


def score(case: Case, traffic: str) -> float:
    """What it is for, less being better. Scope batch: how much larger the variances of queues and of the longest queue are, that which is
    lowered less; scope sequence, which knows no queue: the former; reuse: the number of experts in use."""
    found = case.judgements[traffic]
    if case.damping.kind == "reuse":
        return found.queue.active / found.undamped.active - 1
    return found.variance if case.damping.scope == "sequence" else both(case, traffic)


def both(case: Case, traffic: str) -> float:
    """How much larger the variances of queues and of the longest queue are, that which is lowered less."""
    found = case.judgements[traffic]
    return max(found.variance, found.longest_variance)


def front(cases: Sequence[Case], traffic: str) -> list[Case]:
    """Those that none other beats in both loss and score, by loss."""
    found: list[Case] = []
    tried = [case for case in cases if traffic in case.judgements]
    for case in sorted(tried, key=lambda case: (cost(case, traffic), score(case, traffic))):
        if score(case, traffic) < min((score(other, traffic) for other in found), default=0.0):
            found.append(case)
    return found


def _table(traffic: str, cases: Sequence[Case], perplexity: float) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=f"balance: {traffic}", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("setting", "perplexity", "+-", "rerouted", "queue variance", "longest", "its variance", "active"):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    tried = [case for case in cases if traffic in case.judgements]
    for queue in [case.judgements[traffic].undamped for case in tried[:1]]:  # the same beside all of them
        plain = (queue.variance, queue.longest, queue.longest_variance, queue.active)
        table.add_row("off", f"{perplexity:.2f}", "", "", *(f"{number:.2f}" for number in plain))
    for case in tried:
        found = case.judgements[traffic]
        queue = found.queue
        cells = [f"{found.change.share:+.2%}", f"{found.change.error:.2%}", f"{found.rerouted:.1%}"]
        cells += [f"{queue.variance:.2f} ({found.variance:+.0%})", f"{queue.longest:.2f}"]
        cells += [f"{queue.longest_variance:.2f} ({found.longest_variance:+.0%})", f"{queue.active:.2f}"]
        table.add_row(write_setting(case.damping), *cells)
    return table
