"""The answer of Experts.Route for people: tables, one JSON object, a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from colibri.v1 import experts_pb2 as pb
from ops.commands.common import CommandError
from service.printable import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

MOST_COLUMNS = 8
"""Layers whose tokens are listed beside each other."""
_SHADES = " ▁▂▃▄▅▆▇█"  # empty to twice the mean
_CELLS = 64  # columns of a layer's load; neighbours share one where there are more experts
_DETAILS = 16  # experts of a line up to which weights stand beside them
_DTYPES = {pb.DATA_TYPE_F32: "<f4", pb.DATA_TYPE_I32: "<i4"}
_DPI = 110
_INCHES = 12.0  # of a picture's width


@dataclass(frozen=True, slots=True)
class RouteTable:
    """T tokens, L layers, k experts each."""

    answer: pb.RouteResponse
    experts: NDArray[np.int32]  # [L, T, k]
    weights: NDArray[np.float32]  # [L, T, k]
    margins: NDArray[np.float32]  # [L, T]

    @classmethod
    def of(cls, answer: pb.RouteResponse) -> RouteTable:
        """Unpacks an answer."""
        return cls(answer, tensor(answer.experts), tensor(answer.weights), tensor(answer.margins))

    @property
    def pieces(self) -> list[str]:
        """The tokens as text, quoted so that blanks and control characters show; their numbers where there is no text."""
        numbers, raw = self.answer.token_ids, self.answer.token_bytes
        return [repr(piece.decode(errors="replace")) if piece else f"#{number}" for number, piece in zip(numbers, raw, strict=True)]

    def counts(self) -> NDArray[np.int64]:
        """Tokens of each expert [L, experts]."""
        per_layer = [np.bincount(layer.ravel(), minlength=self.answer.experts_per_layer) for layer in self.experts]
        return np.array(per_layer, np.int64)


def tensor(message: pb.Tensor) -> NDArray[Any]:
    """Its numbers. CommandError for a type this version does not know."""
    if message.dtype not in _DTYPES:
        raise CommandError(f"the server answered with numbers of type {message.dtype}, which this version cannot read; update it")
    return np.frombuffer(message.data, _DTYPES[message.dtype]).reshape(tuple(message.shape))


# ---------------------------------------------------------------- tables


def tables(routes: RouteTable) -> Iterator[RenderableType]:
    """A line a layer, then a line a token if the layers are few."""
    answer = routes.answer
    each = f"{answer.experts_per_layer} experts a layer, {routes.experts.shape[2]} a token"
    yield Text(f"{answer.model}: {counted(len(answer.token_ids), 'token')}, {each}")
    if answer.routed:
        share = answer.rerouted / answer.routed
        yield Text(f"damping gave other experts to {answer.rerouted} of {answer.routed} pairs of a token and a layer ({share:.2%})")
    yield _layers(routes)
    if len(answer.layers) > MOST_COLUMNS:
        yield Text(f"tokens are listed for up to {MOST_COLUMNS} layers: choose some with --layer", style="dim")
        return
    yield Text("experts, the weight of each, and how far the next one was", style="dim")
    yield _tokens(routes)


def _layers(routes: RouteTable) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "experts used", "busiest", "max/mean", "first as before", "median margin"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("load (full: twice the mean)", no_wrap=True)
    for place, (layer, counts) in enumerate(zip(routes.answer.layers, routes.counts(), strict=True)):
        first = routes.experts[place, :, 0]
        repeats = f"{np.mean(first[1:] == first[:-1]):.0%}" if len(first) > 1 else "-"
        table.add_row(
            str(layer),
            f"{np.count_nonzero(counts)}",
            f"{counts.argmax()} ({counts.max()})",
            f"{counts.max() / counts.mean():.2f}",
            repeats,
            _margin(float(np.median(routes.margins[place]))),
            _load(counts),
        )
    return table


def _load(counts: NDArray[np.int64]) -> str:
    each = -(-len(counts) // _CELLS)
    cells = [counts[at : at + each].mean() / counts.mean() for at in range(0, len(counts), each)]
    top = len(_SHADES) - 1
    return "".join(_SHADES[min(top, round(heat / 2 * top))] for heat in cells)


def _tokens(routes: RouteTable) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("token", no_wrap=True)
    for layer in routes.answer.layers:
        table.add_column(f"layer {layer}")
    detailed = routes.experts.shape[0] * routes.experts.shape[2] <= _DETAILS
    for at, piece in enumerate(routes.pieces):
        table.add_row(Text(piece), *(_cell(routes, place, at, detailed) for place in range(len(routes.answer.layers))))
    return table


def _cell(routes: RouteTable, place: int, at: int, detailed: bool) -> Text:
    pairs = zip(routes.experts[place, at].tolist(), routes.weights[place, at].tolist(), strict=True)
    names = [f"{expert} {weight:.2f}" if detailed else str(expert) for expert, weight in pairs]
    return Text((", " if detailed else " ").join(names)).append(f"  {_margin(float(routes.margins[place, at]))}", style="dim")


def _margin(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


# ---------------------------------------------------------------- JSON and picture


def as_json(routes: RouteTable) -> dict[str, object]:
    """One object; a margin is null where every expert is chosen."""
    answer = routes.answer
    texts = [raw.decode(errors="replace") for raw in answer.token_bytes]
    return {
        "model": answer.model,
        "experts_per_layer": answer.experts_per_layer,
        "tokens": [{"id": number, "text": text} for number, text in zip(answer.token_ids, texts, strict=True)],
        "layers": [
            {
                "layer": layer,
                "experts": routes.experts[place].tolist(),
                "weights": [[_exact(weight) for weight in row] for row in routes.weights[place]],
                "margins": [_exact(margin) for margin in routes.margins[place]],
            }
            for place, layer in enumerate(answer.layers)
        ],
        "rerouted": answer.rerouted,
        "routed": answer.routed,
    }


def _exact(value: np.float32) -> float | None:
    """The shortest decimal that is this number."""
    return float(str(value)) if np.isfinite(value) else None


def draw(routes: RouteTable, out: Path) -> None:
    """Tokens from left to right, the experts of each layer from top to bottom, weights as colour; beside it each expert's share.

    CommandError without matplotlib, or for a name that is no picture's.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as cause:
        raise CommandError("drawing needs matplotlib: pip install 'colibri[plot]'") from cause
    layers, tokens, _ = routes.experts.shape
    height = min(40.0, 1.5 + 0.12 * max(layers * min(routes.answer.experts_per_layer, 8), 16))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "colibri"}):  # text as text, and the same bytes every time
        figure, (text, load) = pyplot.subplots(1, 2, figsize=(_INCHES, height), width_ratios=(4, 1), sharey=True, layout="constrained")
        _draw_text(text, routes)
        _draw_load(load, routes)
        figure.suptitle(f"{routes.answer.model}: experts of {tokens} tokens", fontsize=10)
        try:
            figure.savefig(out, dpi=_DPI)
        except ValueError as cause:
            raise CommandError(f"{out}: {cause}; name it .png or .svg") from cause
        finally:
            pyplot.close(figure)


def _draw_text(panel: Axes, routes: RouteTable) -> None:
    layers, tokens, _ = routes.experts.shape
    each = routes.answer.experts_per_layer
    grid = np.zeros((layers, each, tokens), np.float32)
    np.put_along_axis(grid, routes.experts.transpose(0, 2, 1), routes.weights.transpose(0, 2, 1), axis=1)
    panel.imshow(grid.reshape(layers * each, tokens), aspect="auto", interpolation="nearest", cmap="magma", vmin=0)
    panel.set_yticks([place * each + (each - 1) / 2 for place in range(layers)], [f"layer {layer}" for layer in routes.answer.layers])
    for place in range(1, layers):
        panel.axhline(place * each - 0.5, color="white", linewidth=0.8)
    if tokens <= 80:
        panel.set_xticks(range(tokens), _ticks(routes.pieces), rotation=90, fontsize=7)
    else:
        panel.set_xlabel("token")


def _ticks(pieces: Sequence[str]) -> list[str]:
    """As matplotlib takes them: a dollar would begin a formula."""
    return [piece.replace("$", r"\$") for piece in pieces]


def _draw_load(panel: Axes, routes: RouteTable) -> None:
    layers, tokens, _ = routes.experts.shape
    each = routes.answer.experts_per_layer
    mean = routes.experts.shape[2] / each
    for place, counts in enumerate(routes.counts()):
        panel.barh(place * each + np.arange(each), counts / tokens, height=0.9, color="tab:orange")
    panel.axvline(mean, color="grey", linewidth=0.8, linestyle="--")
    panel.set_xlabel("share of tokens (dashed: even)", fontsize=8)
    for place in range(1, layers):
        panel.axhline(place * each - 0.5, color="grey", linewidth=0.8)
