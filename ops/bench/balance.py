"""The judgement of routing policies on held-out texts: every policy and scope over its settings, as a report.

    colibri bench balance MODEL.colibri --texts FOLDER --json > balance.json

All settings are tried on the first traffic, mixed if not asked otherwise; those that no other beats there are tried on the rest too, and
the chosen ones over nodes as well. docs/balance.md is made of such a report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_c import Damping
from ops.bench.balance_nodes import replay
from ops.bench.balance_report import LIMITS, BalanceReport, Case, NodeRow, by_group, cost, front, score
from ops.bench.balance_run import Judge
from ops.bench.balance_settings import GROUPS, sweep, write_setting
from ops.bench.balance_stats import perplexity, queues
from ops.bench.balance_traffic import CONTEXT, MIXED, SHIFTING, STEPS, STREAMS, Texts, Traffic, load_texts, make_traffic, names
from ops.bench.measure import describe_machine

CURVE = 5
"""Settings of a policy and scope that all kinds of traffic are run with."""
MOST_LOSS = 0.03
"""More is of no interest."""
NODES = (2, 4)
REPLICAS = (0, 1)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What to judge."""

    texts: Path
    groups: tuple[tuple[str, str], ...] = GROUPS
    settings: tuple[Damping, ...] = ()  # these instead of the groups' sweeps
    traffic: tuple[str, ...] = ()  # none: all there is
    streams: int = STREAMS
    steps: int = STEPS
    context: int = CONTEXT
    lanes: int = 1


def bench_balance(path: Path, wish: Wish, say: Say) -> BalanceReport:
    """Judges everything asked for; say is told what is being done. EngineError, BenchError."""
    texts = load_texts(path, wish.texts)
    wanted = wish.traffic or names(texts)
    with Judge.open(path, streams=wish.streams, context=wish.context, lanes=wish.lanes) as judge:
        traffic = {name: _make(name, texts, wish) for name in wanted}
        cases = _judge(judge, traffic, wish, say)
        chosen = {f"{policy}/{scope}": _choose(own, wanted[0]) for (policy, scope), own in by_group(cases).items()}
        nodes = _over_nodes(judge, traffic, cases, chosen, say)
        undamped = {name: perplexity(judge.undamped(made).logprobs) for name, made in traffic.items()}
    tokens = {kind: len(ids) for kind, ids in texts.kinds.items()}
    return BalanceReport(
        model=path.name,
        machine=describe_machine(),
        streams=wish.streams,
        steps=wish.steps,
        context=wish.context,
        tokens=tokens,
        undamped=undamped,
        cases=tuple(cases),
        chosen=chosen,
        nodes=tuple(nodes),
    )


def _make(name: str, texts: Texts, wish: Wish) -> Traffic:
    return make_traffic(name, texts, streams=wish.streams, steps=wish.steps, context=wish.context)


def _judge(judge: Judge, traffic: dict[str, Traffic], wish: Wish, say: Say) -> list[Case]:
    """The first traffic decides which settings the others are run with; settings that were named are run with all."""
    first, *others = traffic
    cases = [Case(damping) for damping in wish.settings or [d for group in wish.groups for d in sweep(*group)]]
    for number, case in enumerate(cases):
        say(f"{first}, setting {number + 1} of {len(cases)}: {write_setting(case.damping)}")
        case.judgements[first] = judge.evaluate(traffic[first], case.damping)
    kept = cases if wish.settings else [case for own in by_group(cases).values() for case in _worth_more(own, first)]
    for name in others:
        for number, case in enumerate(kept):
            say(f"{name}, setting {number + 1} of {len(kept)}: {write_setting(case.damping)}")
            case.judgements[name] = judge.evaluate(traffic[name], case.damping)
    return cases


def _worth_more(cases: Sequence[Case], traffic: str) -> list[Case]:
    """A few of those that none other beats, spread from little loss to much, and the best within each limit."""
    able = [case for case in front(cases, traffic) if cost(case, traffic) <= MOST_LOSS]
    spread = [able[index * (len(able) - 1) // max(1, CURVE - 1)] for index in range(CURVE)] if able else []
    best = [case for case in cases if write_setting(case.damping) in _choose(cases, traffic).values()]
    return [case for case in cases if case in spread or case in best]


def _choose(cases: Sequence[Case], traffic: str) -> dict[str, str | None]:
    """The best setting within each limit; None if no setting is, or none does any good."""
    found: dict[str, str | None] = {}
    for limit in LIMITS:
        able = [case for case in cases if cost(case, traffic) <= limit and score(case, traffic) < 0]
        best = min(able, key=lambda case: score(case, traffic), default=None)
        found[f"{limit:g}"] = write_setting(best.damping) if best else None
    return found


def _over_nodes(
    judge: Judge, traffic: dict[str, Traffic], cases: Sequence[Case], chosen: dict[str, dict[str, str | None]], say: Say
) -> list[NodeRow]:
    """The undamped runs and the best settings within the first limit, on mixed and shifting traffic."""
    wanted = {setting for own in chosen.values() if (setting := own[f"{LIMITS[0]:g}"])}
    dampings: list[Damping | None] = [None, *(case.damping for case in cases if write_setting(case.damping) in wanted)]
    info = judge.model.info
    size = info.expert_bytes // (info.layers * info.experts)
    rows = []
    for name in (name for name in (MIXED, SHIFTING) if name in traffic):
        for damping in dampings:
            setting = write_setting(damping) if damping else "off"
            say(f"{name} over nodes: {setting}")
            outcome = judge.undamped(traffic[name]) if damping is None else judge.run(traffic[name], damping)
            loads = queues(outcome.experts, count=info.experts)
            found = (replay(loads, nodes=n, expert_bytes=size, replicas=copies) for n in NODES if n <= info.experts for copies in REPLICAS)
            rows += [NodeRow(setting, name, one) for one in found]
    return rows
