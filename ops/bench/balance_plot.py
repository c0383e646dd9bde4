"""What evenness costs, as PNG and SVG, from the report of `colibri bench balance --json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ops.bench.balance_report import LIMITS, BalanceReport, Case, by_group, cost
from ops.bench.balance_run import Judgement
from ops.bench.measure import BenchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL = (4.6, 3.7)  # inches
_DPI = 110
_MOST_COST = 0.06  # shown to the right

Measure = Callable[[Judgement], float]


def longest_variance(found: Judgement) -> float:
    """Per cent of the undamped variance of the longest queue that is left."""
    return 100 * (1 + found.longest_variance)


def variance(found: Judgement) -> float:
    """Per cent of the undamped variance of queues that is left."""
    return 100 * (1 + found.variance)


def active(found: Judgement) -> float:
    """Per cent of the experts that have a token without a policy."""
    return 100 * found.queue.active / found.undamped.active


def draw_balance(report: BalanceReport, out: Path) -> list[Path]:
    """Writes OUT.png and OUT.svg. BenchError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as cause:
        raise BenchError("drawing needs matplotlib: pip install 'colibri[plot]'") from cause
    written = [out.with_suffix(suffix) for suffix in (".png", ".svg")]
    evening = [(group, cases) for group, cases in by_group(report.cases).items() if group[0] != "reuse"]
    reuse = [(group, cases) for group, cases in by_group(report.cases).items() if group[0] == "reuse"]
    first = next(iter(report.undamped))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "colibri"}):  # text as text, and the same bytes every time
        figure, panels = pyplot.subplots(2, 3, figsize=(3 * _PANEL[0], 2 * _PANEL[1]), layout="constrained")
        flat = list(panels.flat)
        _policies(flat[0], evening, first, longest_variance, f"{first}: variance of the longest queue")
        _policies(flat[1], evening, first, variance, f"{first}: variance of queue lengths")
        _policies(flat[2], reuse, first, active, f"{first}: experts in use")
        for panel, (group, cases) in zip(flat[3:], _shown_by_kind(evening), strict=False):
            measure = longest_variance if group[1] == "batch" else variance
            what = "longest queue" if group[1] == "batch" else "queues"
            _kinds(panel, cases, list(report.undamped), measure, f"{group[0]}, {group[1]}: variance of {what}")
        for panel in flat[3 + len(_shown_by_kind(evening)) :]:
            panel.set_axis_off()
        figure.supxlabel(f"{report.model}, {report.streams} streams, commit {report.machine.commit or 'unknown'}", fontsize=8)
        for path in written:
            figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
    return written


def _shown_by_kind(groups: Sequence[tuple[tuple[str, str], list[Case]]]) -> list[tuple[tuple[str, str], list[Case]]]:
    """Three that reach furthest within the larger limit, each scope being there."""

    def reach(entry: tuple[tuple[str, str], list[Case]]) -> float:
        found = [next(iter(case.judgements.values())) for case in entry[1]]
        return min((one.variance for one in found if one.change.share <= max(LIMITS)), default=1.0)

    ordered = sorted(groups, key=reach)
    firsts = [next((entry for entry in ordered if entry[0][1] == scope), None) for scope in ("batch", "sequence")]
    chosen = [entry for entry in firsts if entry is not None]
    chosen += [entry for entry in ordered if entry not in chosen][: 3 - len(chosen)]
    return [entry for entry in groups if entry in chosen]


def _policies(panel: Axes, groups: Sequence[tuple[tuple[str, str], list[Case]]], traffic: str, measure: Measure, title: str) -> None:
    """Every setting as a dot; those no other beats as a line."""
    for (policy, scope), cases in groups:
        shown = [case for case in cases if traffic in case.judgements and cost(case, traffic) <= _MOST_COST]
        costs, left = [100 * cost(case, traffic) for case in shown], [measure(case.judgements[traffic]) for case in shown]
        best = _envelope(list(zip(costs, left, strict=True)))
        (line,) = panel.plot(*zip((0.0, 100.0), *best, strict=True), marker="o", markersize=3.5, label=f"{policy}, {scope}")
        panel.scatter(costs, left, s=6, alpha=0.3, color=line.get_color())
    _finish(panel, title)


def _kinds(panel: Axes, cases: Sequence[Case], traffics: Sequence[str], measure: Measure, title: str) -> None:
    for traffic in traffics:
        tried = [case for case in cases if traffic in case.judgements and cost(case, traffic) <= _MOST_COST]
        points = _envelope([(100 * cost(case, traffic), measure(case.judgements[traffic])) for case in tried])
        panel.plot(*zip((0.0, 100.0), *points, strict=True), marker="o", markersize=3.5, label=traffic)
    _finish(panel, title)


def _envelope(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that none other beats in both, by the first."""
    found: list[tuple[float, float]] = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def _finish(panel: Axes, title: str) -> None:
    for limit in LIMITS:
        panel.axvline(100 * limit, color="grey", linewidth=0.8, linestyle=":")
    panel.set(title=title, xlabel="perplexity, % more", ylabel="% of that without a policy", xlim=(-0.3, 100 * _MOST_COST))
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8)
