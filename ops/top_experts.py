"""How experts are used, as `colibri top` draws it: a line of figures, and a map of the experts by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.text import Text

from colibri.v1 import operator_pb2 as pb
from ops.commands.common import human_bytes
from service.load import Load

_SHADES = " ▁▂▃▄▅▆▇█"
_HOT, _COLD = 2.0, 0.25  # tokens of an expert over the layer's mean: from here on it stands out
_BESIDE = 6 + 2 + len('max/mean 12.34')  # columns of the label before the map and of the first figure behind it


def routing_lines(load: Load, nodes: Sequence[pb.NodeLoad]) -> list[Text]:
    """All layers together."""
    whole = sum(node.step_bytes for node in nodes)
    first = f"  routing of {load.seconds:.1f} s  {'  '.join(_figures(load, slice(None)))}"
    second = f"  active {load.active_mean.mean():.1f}/{load.experts}  repeats {load.repeat_share.mean():.0%}  {human_bytes(whole)} a step"
    if len(nodes) > 1 and whole:
        second += f"  {'  '.join(f'NUMA node {node.node} {node.step_bytes / whole:.0%}' for node in nodes)}"
    return [Text(first), Text(second)]


def load_map(load: Load, *, width: int, rows: int) -> list[Text]:
    """heat_map with as many figures of each line's layers as there is room for: its queues' variance, the longest queue (mean over steps,
    then of all since the start), and what damping rerouted."""
    return heat_map(load.tokens.tolist(), width=width, rows=rows, figures=lambda layers: _figures(load, layers))


def _figures(load: Load, layers: slice) -> list[str]:
    """Of some layers, the most wanted first."""
    return [
        f"max/mean {load.max_over_mean[layers].mean():.2f}",
        f"variance {load.queue_variance[layers].mean():.2f}",
        f"longest {load.longest_mean[layers].mean():.1f}/{load.queue_max[layers].max()}",
        f"rerouted {load.rerouted_share[layers].mean():.1%}",
    ]


def heat_map(
    layers: Sequence[Sequence[int]], *, width: int, rows: int, figures: Callable[[slice], Sequence[str]] | None = None
) -> list[Text]:
    """Tokens of each expert against its layer's mean, a line a layer; neighbours share a cell where there is no room for all. `figures` of
    the layers of a line follow it as far as there is room, at least the first; if not given, max/mean."""
    if not layers or not any(map(any, layers)):
        return []
    per_line = -(-len(layers) // max(1, rows - 1))
    per_cell = -(-len(layers[0]) // max(1, width - _BESIDE))
    note = f", {per_line} layers a line" if per_line > 1 else ""
    note += f", {per_cell} experts a cell" if per_cell > 1 else ""
    title = f"  experts (layer by layer, {len(layers[0])} each{note}; full: twice the mean)"
    lines = [Text(title, style="dim")]
    for at in range(0, len(layers), per_line):
        of_line = slice(at, at + per_line)
        cells = _cells([sum(column) for column in zip(*layers[of_line], strict=True)], per_cell)
        mean = sum(cells) / len(cells)
        beside = figures(of_line) if figures is not None else [f"max/mean {max(cells) / mean:.2f}" if mean else ""]
        lines.append(_with_figures(_heat_line(f"  {at:3d} ", cells, mean), beside if mean else ["idle"], width))
    return lines


def _cells(counts: Sequence[int], per_cell: int) -> list[float]:
    groups: Iterable[Sequence[int]] = (counts[at : at + per_cell] for at in range(0, len(counts), per_cell))
    return [sum(group) / len(group) for group in groups]


def _heat_line(label: str, cells: Sequence[float], mean: float) -> Text:
    line = Text(label, no_wrap=True, overflow="crop")
    for cell in cells:
        heat = cell / mean if mean else 0.0
        colour = "red" if heat >= _HOT else "blue" if heat <= _COLD else "green"
        line.append(_SHADES[min(len(_SHADES) - 1, round(heat / _HOT * (len(_SHADES) - 1)))], style=colour)
    return line


def _with_figures(line: Text, figures: Sequence[str], width: int) -> Text:
    """As many as there is room for, at least one."""
    for place, figure in enumerate(figures):
        if place and line.cell_len + 2 + len(figure) > width:
            break
        line.append(f"  {figure}", style="dim")
    return line
