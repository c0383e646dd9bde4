"""Reports of `colibri bench peers` as a Markdown table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ops.bench.measure import OURS, BenchError, figure

Row = Mapping[str, object]


def markdown(reports: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """A line for each case of each model: medians with their spreads, ours over the best peer's, plain reading speed beside both."""
    yield "| | Colibri | best peer | ratio | others | plain read, GB/s |"
    yield "|---|---|---|---|---|---|"
    for report in reports:
        rows = report["rows"]
        assert isinstance(rows, list)
        for case in dict.fromkeys(str(row["case"]) for row in rows):
            yield _line(str(report["model"]), case, [row for row in rows if row["case"] == case])


def _line(model: str, case: str, rows: Sequence[Row]) -> str:
    ours = next((row for row in rows if row["engine"] == OURS), None)
    if ours is None:
        raise BenchError(f"{model}: {case} has no row of ours to compare with")
    peers = sorted((row for row in rows if not str(row["engine"]).startswith(OURS)), key=lambda row: -_median(row))
    variants = [row for row in rows if str(row["engine"]).startswith(OURS) and row is not ours]
    best = f"{_shown(peers[0])} {peers[0]['engine']}" if peers else ""
    ratio = f"{_median(ours) / _median(peers[0]):.2f}" if peers else ""
    others = ", ".join(f"{_shown(row)} {row['engine']}" for row in [*peers[1:], *variants])
    speeds = sorted(speed for row in [ours, *peers] if (speed := _detail(row, "read GB/s")))
    read = f"{speeds[0]:.0f}-{speeds[-1]:.0f}" if speeds else ""
    return f"| {model}, {case} | {_shown(ours)} | {best} | {ratio} | {others} | {read} |"


def _median(row: Row) -> float:
    return float(str(row["median"]))


def _shown(row: Row) -> str:
    return f"{figure(_median(row))} (\u00b1{float(str(row['spread'])) / 2:.0%})"


def _detail(row: Row, name: str) -> float:
    details = row["details"]
    assert isinstance(details, dict)
    return float(details.get(name, 0.0))
