"""The loss curve as a picture: python -m ops.tiny.plot ops/tiny/loss.csv docs/images/tiny-loss.svg"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from ops.tiny.splits import KINDS

COLOURS = dict(zip(KINDS, ("tab:blue", "tab:orange", "tab:green"), strict=True))


def read(path: Path) -> list[dict[str, float]]:
    """The lines of `loss.csv`; a field that was not measured is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def smoothed(values: list[float], window: int = 5) -> list[float]:
    """Mean of each value and those shortly before it."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]


def draw(rows: list[dict[str, float]], out: Path) -> None:
    """Lines: training, smoothed. Points: validation. The learning rate behind, in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "colibri"}):  # the same bytes every time
        figure, panel = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for kind in KINDS:
            known = [row for row in rows if kind in row]
            panel.plot([row["step"] for row in known], smoothed([row[kind] for row in known]), color=COLOURS[kind], lw=1, label=kind)
            held_out = [row for row in rows if f"validation_{kind}" in row]
            points = [row[f"validation_{kind}"] for row in held_out]
            panel.plot([row["step"] for row in held_out], points, "o", color=COLOURS[kind], ms=4, label=f"{kind}, held out")
        panel.set(xlabel="step of 2,048 tokens", ylabel="loss, nats a token")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
        behind = panel.twinx()
        behind.plot([row["step"] for row in rows], [row["rate"] for row in rows], color="0.8", lw=1)
        behind.set_ylabel("learning rate", color="0.5")
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("out", type=Path, nargs="+", help=".svg or .png")
    options = parser.parse_args()
    for out in options.out:
        draw(read(options.csv), out)


if __name__ == "__main__":
    main()
