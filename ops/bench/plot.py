"""Tokens a second against streams, from the JSON of `colibri bench batch`, `serve` and `peers`, as PNG and SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.bench.measure import BenchError

_COLUMNS = 3  # panels beside each other
_PANEL = (4.4, 3.6)  # inches
_DPI = 110


@dataclass(frozen=True, slots=True)
class Curve:
    """One engine on one model: (streams, median, least, most) by streams."""

    engine: str
    model: str
    points: tuple[tuple[int, float, float, float], ...]


def read_report(path: Path) -> Mapping[str, object]:
    """One JSON object of `--json`. BenchError."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise BenchError(f"{path} is no JSON ({cause}); write it with `colibri bench ... --json > FILE`") from cause
    if not isinstance(report, dict) or not isinstance(report.get("rows"), list):
        raise BenchError(f"{path} is no report of `colibri bench`: it has no rows")
    return report


def curves(reports: Sequence[Mapping[str, object]]) -> list[Curve]:
    """Every engine's points, model by model; later files win where two have the same point. BenchError if there is none."""
    found: dict[tuple[str, str], dict[int, tuple[int, float, float, float]]] = {}
    for report in reports:
        rows = report["rows"]
        assert isinstance(rows, list)
        for row in rows:
            streams = row["details"].get("streams")
            if streams is None or row["unit"] != "tokens/s":
                continue
            engine = "colibri gRPC" if row["case"].startswith("gRPC") else row["engine"]
            point = (int(streams), float(row["median"]), min(row["samples"]), max(row["samples"]))
            if "behind" not in row["case"]:
                found.setdefault((str(report["model"]), engine), {})[int(streams)] = point
    if not found:
        raise BenchError("none of the files has rows with a number of streams; give those of `bench batch`, `serve` or `peers`")
    return [Curve(engine, model, tuple(points[n] for n in sorted(points))) for (model, engine), points in found.items()]


def where(report: Mapping[str, object]) -> str:
    """The machine, for the figure's foot."""
    machine, limits = report.get("machine"), report.get("limits")
    if not isinstance(machine, dict) or not isinstance(limits, dict):
        return ""
    parts = f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, commit {machine['commit'] or 'unknown'}"
    rows = report["rows"]
    assert isinstance(rows, list)
    speeds = [row["details"]["read GB/s"] for row in rows if "read GB/s" in row["details"]] or [limits["read_gb_s"]]
    return f"{parts}, plain read {min(speeds):.0f} to {max(speeds):.0f} GB/s"


def draw(reports: Sequence[Mapping[str, object]], out: Path) -> list[Path]:
    """One panel a model; writes OUT.png and OUT.svg (a suffix of OUT is replaced). BenchError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as cause:
        raise BenchError("drawing needs matplotlib: pip install 'colibri[plot]'") from cause
    found = curves(reports)
    models = list(dict.fromkeys(curve.model for curve in found))
    columns = min(_COLUMNS, len(models))
    lines = -(-len(models) // columns)
    size = (_PANEL[0] * columns, _PANEL[1] * lines)
    written = [out.with_suffix(suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "colibri"}):  # text as text, and the same bytes every time
        figure, panels = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
        for place, panel in enumerate(panels.flat):
            if place < len(models):
                _panel(panel, models[place], [curve for curve in found if curve.model == models[place]])
            else:
                panel.set_axis_off()
        figure.supxlabel(where(reports[0]), fontsize=8)
        for path in written:
            figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
    return written


def _panel(panel: object, model: str, found: Sequence[Curve]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(panel, Axes)
    for curve in sorted(found, key=lambda curve: not curve.engine.startswith("colibri")):
        streams, medians, least, most = zip(*curve.points, strict=True)
        below = [median - low for median, low in zip(medians, least, strict=True)]
        above = [high - median for median, high in zip(medians, most, strict=True)]
        style = "-" if curve.engine.startswith("colibri") else "--"
        panel.errorbar(streams, medians, yerr=[below, above], marker="o", markersize=4, capsize=3, linestyle=style, label=curve.engine)
    ticks = sorted({point[0] for curve in found for point in curve.points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_ylim(bottom=0)
    panel.set(title=model, xlabel="streams of different tokens", ylabel="generated tokens/s (median, range)")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
