"""What nodes would have had to do: traffic replayed over placements of experts, each planned from the traffic before it.

A placement is planned at the end of every window and holds for the next one. What counts is max/mean: the work of the node that has most
over the mean of all, layer by layer, since a layer is as slow as that node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from workers.balance import plan_balance
from workers.packing import Copies, pour

WINDOW = 64  # steps of decoding a placement is planned from

Placing: TypeAlias = Sequence[Sequence[Copies]]  # [layers][experts]: nodes that hold it


@dataclass(frozen=True, slots=True)
class Replay:
    """max/mean over all times and layers that had something to do."""

    nodes: int
    replicas: int  # further copies a layer may have
    even: float  # neighbouring experts on a node, as many on each
    planned: float
    moves: int  # experts moved or copied
    bytes: int  # of these


def even_placing(layers: int, experts: int, nodes: int) -> list[list[Copies]]:
    """Neighbouring experts share a node; the first one's turns from layer to layer, as the service places them."""
    return [[((expert * nodes // experts + layer) % nodes,) for expert in range(experts)] for layer in range(layers)]


def replay(
    loads: NDArray[np.integer], *, nodes: int, expert_bytes: int, window: int = WINDOW, replicas: int = 0, min_gain: float = 0.0
) -> Replay:
    """Loads [times, layers, experts]: tokens in a step, or in a longer time. The first window is placed evenly in both cases."""
    times, layers, experts = loads.shape
    begin = even_placing(layers, experts, nodes)
    current: Placing = begin
    planned, moves, moved = [], 0, 0
    for start in range(0, times, window):
        if start:
            before = loads[max(0, start - window) : start].sum(axis=0).tolist()
            plan = plan_balance(before, expert_bytes, range(nodes), current, replicas=replicas, min_gain=min_gain)
            current, moves, moved = plan.copies, moves + len(plan.moves) + len(plan.replicas), moved + plan.bytes
        planned.append(ratios(loads[start : start + window], current, nodes))
    return Replay(nodes, replicas, _mean(ratios(loads, begin, nodes)), _mean(np.concatenate(planned)), moves, moved)


def ratios(loads: NDArray[np.integer], placing: Placing, nodes: int) -> NDArray[np.float64]:
    """max/mean of the nodes' work [times, layers]; NaN where there is none."""
    times, layers, _ = loads.shape
    most = np.zeros((times, layers))
    for layer, copies in enumerate(placing):
        base = np.zeros((times, nodes))
        for expert, at in enumerate(copies):
            if len(at) == 1:
                base[:, at[0]] += loads[:, layer, expert]
        most[:, layer] = _poured(base, loads[:, layer], copies).max(axis=1)
    mean = loads.sum(axis=2) / nodes
    found = np.full_like(most, np.nan)
    np.divide(most, mean, out=found, where=mean > 0)
    return found


def _poured(base: NDArray[np.float64], loads: NDArray[np.integer], copies: Sequence[Copies]) -> NDArray[np.float64]:
    """The work of experts with copies comes to that of the others: each of their tasks goes where least is to be done."""
    shared = [(expert, at) for expert, at in enumerate(copies) if len(at) > 1]
    if not shared:
        return base
    speeds = [1.0] * base.shape[1]
    return np.array(
        [pour(own, [(float(row[expert]), at) for expert, at in shared], speeds) for own, row in zip(base.tolist(), loads, strict=True)]
    )


def _mean(values: NDArray[np.float64]) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else 1.0
