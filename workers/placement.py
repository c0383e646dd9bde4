"""Which bytes of a model lie on which NUMA node: a pure plan. No placement changes a result.

- experts: whole experts on nodes, every layer spread over all of them.
- rows: every expert's matrices cut over the nodes, so that each node does its share of both products.
- replicate: a full copy on every node.
- none: wherever the machine puts them.

Where experts are whole the matrices of the backbone, the embedding and layers that have one expert only are cut over the nodes too. What is
small and read by everybody (header, texts, norms, routers) lies with the matrix before it.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from workers.layout import Expert, Layout, Matrix
from workers.mapping import HUGE_PAGE
from workers.plan import PlanError
from workers.topology import Node, Topology

Placement = Literal["auto", "experts", "rows", "replicate", "none"]

PAGE = max(4096, os.sysconf("SC_PAGE_SIZE"))
MAX_EXTENTS = 16384
"""Every process maps each extent; the kernel allows 65530 mappings a process."""
NODE_RESERVE = 64 << 20
"""Memory of a node that must stay free beside its share."""

Mark = tuple[int, int]  # (offset, node): from here to the next mark


class PlacementError(PlanError):
    """The wanted placement can't be had on this machine."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + bytes) of the container belong on a node; -1: on none in particular."""

    node: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """What was decided. extents, ascending, cover the container exactly; with replicate each node's set does. reason is one sentence."""

    placement: Placement
    nodes: tuple[int, ...]
    extents: tuple[Extent, ...]
    reason: str

    def bytes_on(self, node: int) -> int:
        """What a node holds."""
        return sum(extent.bytes for extent in self.extents if extent.node == node)


def whole_file(size: int, reason: str = "one NUMA node has all memory and CPUs, so there is nothing to place") -> PlacementPlan:
    """Everything in one piece, on no node in particular."""
    return PlacementPlan("none", (), (Extent(-1, 0, size),), reason)


def placement_nodes(topology: Topology) -> tuple[Node, ...]:
    """Nodes that weights may be put on: those with CPUs to read them and memory to hold them."""
    return tuple(node for node in topology.nodes if node.cpus and node.memory_bytes > 0)


def plan_placement(layout: Layout, topology: Topology, wish: Placement) -> PlacementPlan:
    """Plans the wished placement; "auto" cuts rows, which lets one token use every node's memory at once, unless there are too few panels
    for that. It never replicates: that takes a model's memory and loading time again for every node, for a gain only where nodes have
    unequal CPUs.

    Nodes whose free memory does not hold their share are left out. PlacementError if an asked for placement then has fewer than two.
    """
    nodes = placement_nodes(topology)
    if wish == "none":
        return whole_file(layout.size, "no placement was asked for")
    if len(nodes) < 2:
        return whole_file(layout.size)
    left_out: list[Node] = []
    while True:
        plan = _plan(layout, tuple(node.id for node in nodes), wish)
        tight = [node for node in nodes if node.free_bytes is not None and node.free_bytes < plan.bytes_on(node.id) + NODE_RESERVE]
        if not tight:
            return replace(plan, reason=plan.reason + _without(left_out))
        left_out.append(min(tight, key=lambda node: node.free_bytes or 0))
        nodes = tuple(node for node in nodes if node not in left_out)
        if len(nodes) < 2:
            return _refuse(layout, plan, left_out, wish)


def fine_extents(plan: PlacementPlan, layout: Layout | None) -> tuple[Extent, ...]:
    """A plan's extents, for whole experts cut at each that is smaller than a huge page: it could not be moved alone if it shared one."""
    if layout is None or plan.placement != "experts":
        return plan.extents
    experts = [expert for layer in layout.layers if len(layer) > 1 for expert in layer if expert.bytes < HUGE_PAGE]
    cuts = sorted({-(-at // PAGE) * PAGE for expert in experts for at in (expert.gate_up.offset, expert.down.end)})
    fine: list[Extent] = []
    for extent in plan.extents:
        end = extent.offset + extent.bytes
        inner = cuts[bisect_right(cuts, extent.offset) : bisect_left(cuts, end)]
        fine += [Extent(extent.node, a, b - a) for a, b in pairwise([extent.offset, *inner, end])]
    return tuple(fine)


def _refuse(layout: Layout, plan: PlacementPlan, tight: Sequence[Node], wish: Placement) -> PlacementPlan:
    have = ", ".join(f"NUMA node {node.id} has {_mib(node.free_bytes or 0)} free" for node in tight)
    sentence = f"a share of the weights takes up to {_mib(max(map(plan.bytes_on, plan.nodes)) + NODE_RESERVE)} of a NUMA node and {have}"
    if wish == "auto":
        return whole_file(layout.size, f"{sentence}, so the weights are not placed")
    raise PlacementError(f"placement {wish} is not possible: {sentence}; free memory or use placement none")


def _without(left_out: Sequence[Node]) -> str:
    if not left_out:
        return ""
    return "; left out for want of free memory: " + ", ".join(f"NUMA node {node.id}" for node in left_out)


def _plan(layout: Layout, nodes: tuple[int, ...], wish: Placement) -> PlacementPlan:
    count = len(nodes)
    if wish == "replicate":
        extents = tuple(Extent(node, 0, layout.size) for node in nodes)
        return PlacementPlan("replicate", nodes, extents, f"a full copy on each of {count} NUMA nodes was asked for")
    rows = _extents(layout.size, [*_backbone(layout, nodes), *_expert_rows(layout, nodes)])
    fewest = min((matrix.units for matrix in _cut_matrices(layout)), default=count)
    if wish == "rows" and len(rows) <= MAX_EXTENTS:
        return PlacementPlan("rows", nodes, rows, f"every matrix cut over {count} NUMA nodes was asked for")
    if wish == "auto" and fewest >= count and len(rows) <= MAX_EXTENTS:
        why = f"every matrix has panels for all {count} NUMA nodes, so each token reads from all their memories at once"
        return PlacementPlan("rows", nodes, rows, why)
    experts = _extents(layout.size, [*_backbone(layout, nodes), *_whole_experts(layout, nodes)])
    if len(experts) > MAX_EXTENTS:
        raise PlacementError(f"placement {wish} takes {len(experts)} pieces, {MAX_EXTENTS} are possible; use placement replicate or none")
    if wish == "experts":
        why = f"whole experts on {count} NUMA nodes were asked for"
    elif fewest < count:
        why = f"a matrix has {fewest} panels, too few for {count} NUMA nodes, so experts stay whole"
    else:
        why = f"rows cut over {count} NUMA nodes would take {len(rows)} mappings in every process, so experts stay whole"
    return PlacementPlan("experts", nodes, experts, why)


def _cut_matrices(layout: Layout) -> Iterator[Matrix]:
    yield from layout.backbone
    for layer in layout.layers:
        for expert in layer:
            yield from (expert.gate_up, expert.down)


def _cut(matrix: Matrix, nodes: Sequence[int]) -> Iterator[Mark]:
    """Cuts at unit i * units / nodes, where the engine cuts its tasks."""
    for i, node in enumerate(nodes):
        yield matrix.offset + matrix.units * i // len(nodes) * matrix.unit_bytes, node


def _cut_expert(expert: Expert, nodes: Sequence[int]) -> Iterator[Mark]:
    yield from _cut(expert.gate_up, nodes)
    yield from _cut(expert.down, nodes)


def _backbone(layout: Layout, nodes: Sequence[int]) -> Iterator[Mark]:
    for matrix in layout.backbone:
        yield from _cut(matrix, nodes)


def _expert_rows(layout: Layout, nodes: Sequence[int]) -> Iterator[Mark]:
    for layer in layout.layers:
        for expert in layer:
            yield from _cut_expert(expert, nodes)


def _whole_experts(layout: Layout, nodes: Sequence[int]) -> Iterator[Mark]:
    """Neighbouring experts share a node, the first one's node turns from layer to layer, and the nodes that hold least take one more."""
    held = dict.fromkeys(nodes, 0)
    for number, experts in enumerate(layout.layers):
        if len(experts) == 1:
            yield from _cut_expert(experts[0], nodes)
            continue
        turn = number % len(nodes)
        order = [*nodes[turn:], *nodes[:turn]]
        fewest, more = divmod(len(experts), len(nodes))
        fuller = sorted(order, key=lambda node: held[node])[:more]
        remaining = iter(experts)
        for node in order:
            for _ in range(fewest + (node in fuller)):
                expert = next(remaining)
                held[node] += expert.bytes
                yield expert.gate_up.offset, node


def _extents(size: int, marks: Iterable[Mark]) -> tuple[Extent, ...]:
    """Extents from mark to mark, each rounded to the nearest page; the first mark's reaches to the file's beginning."""
    rounded = sorted(((offset + PAGE // 2) // PAGE * PAGE, offset, node) for offset, node in marks)
    starts: list[Mark] = []
    for at, _, node in rounded:
        if starts and starts[-1][0] == at:  # less than a page between two marks: the later one has it
            starts.pop()
        if at < size and (not starts or starts[-1][1] != node):
            starts.append((at, node))
    if not starts:
        return (Extent(-1, 0, size),)
    starts[0] = (0, starts[0][1])
    ends = [at for at, _ in starts[1:]] + [size]
    return tuple(Extent(node, at, end - at) for (at, node), end in zip(starts, ends, strict=True))


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
