"""Which of a model's bytes a process's own copy has, when it needs only a share: the rest is mapped from the file and not touched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from workers.layout import Expert, Layout, LayoutError
from workers.placement import MAX_EXTENTS, PAGE, Extent, PlacementPlan

Range = tuple[int, int]  # begin, end


@dataclass(frozen=True, slots=True)
class Keep:
    """A share. experts: (layer, expert) of those that are kept. backbone: also everything that is no expert, but nothing of the layers
    `but`. layers: kept whole, also without the backbone. Both are ranges [first, end)."""

    experts: frozenset[tuple[int, int]] = frozenset()
    backbone: bool = True
    layers: tuple[Range, ...] = ()
    but: tuple[Range, ...] = ()


def kept_extents(plan: PlacementPlan, layout: Layout, keep: Keep) -> tuple[Extent, ...]:
    """The pieces of a plan's extents that are kept: whole pages, ascending on each node. LayoutError if there are none such experts, or
    too many pieces."""
    ranges = kept_ranges(layout, keep)
    ends = [end for _, end in ranges]
    kept = tuple(
        Extent(extent.node, first, last - first)
        for extent in plan.extents
        for begin, end in ranges[bisect_right(ends, extent.offset) : bisect_right(ends, extent.offset + extent.bytes) + 1]
        if (first := max(begin, extent.offset)) < (last := min(end, extent.offset + extent.bytes))
    )
    if len(kept) > MAX_EXTENTS:
        raise LayoutError(f"the share takes {len(kept)} pieces, {MAX_EXTENTS} are possible; keep neighbouring experts or use load mode map")
    return kept


def kept_ranges(layout: Layout, keep: Keep) -> tuple[Range, ...]:
    """What is kept, cut at pages so that no byte of it is missing, ascending, no two touching."""
    experts = {(number, index): expert for number, layer in enumerate(layout.layers) for index, expert in enumerate(layer)}
    if unknown := sorted(keep.experts - experts.keys()):
        raise LayoutError(f"there is no expert {unknown[0][1]} of layer {unknown[0][0]} in it")
    whole = _of_layers(layout, keep.layers)
    if keep.backbone:
        left = _merged(
            [*(_bytes_of(expert) for place, expert in experts.items() if place not in keep.experts), *_of_layers(layout, keep.but)]
        )
        left = left_out(left, _merged(whole))
        inner = [(-(-begin // PAGE) * PAGE, end // PAGE * PAGE) for begin, end in left]
        return _between([(begin, end) for begin, end in inner if begin < end], layout.size)
    own = _merged([*(_bytes_of(experts[place]) for place in keep.experts), *whole])
    return _merged((begin // PAGE * PAGE, min(-(-end // PAGE) * PAGE, layout.size)) for begin, end in own)


def left_out(ranges: Iterable[Range], kept: Iterable[Range]) -> tuple[Range, ...]:
    """What of some ranges is not in others; both ascend."""
    left: list[Range] = []
    kept, i = tuple(kept), 0
    for begin, end in ranges:
        while i < len(kept) and kept[i][1] <= begin:
            i += 1
        at = i
        while at < len(kept) and kept[at][0] < end:
            if begin < kept[at][0]:
                left.append((begin, kept[at][0]))
            begin, at = max(begin, kept[at][1]), at + 1
        if begin < end:
            left.append((begin, end))
    return tuple(left)


def _of_layers(layout: Layout, ranges: Iterable[Range]) -> list[Range]:
    numbers = [number for first, end in ranges for number in range(first, end)]
    if unknown := [number for number in numbers if not 0 <= number < len(layout.whole)]:
        raise LayoutError(f"there is no layer {unknown[0]} in it: it has {len(layout.whole)}")
    return [extent for number in numbers for extent in layout.whole[number]]


def _bytes_of(expert: Expert) -> Range:
    return expert.gate_up.offset, expert.down.end


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ascending; what is less than a page apart is one: between experts that is padding, and each piece costs a mapping."""
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin < merged[-1][1] + PAGE:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def _between(ranges: Iterable[Range], size: int) -> tuple[Range, ...]:
    """[0, size) without these."""
    at, gaps = 0, []
    for begin, end in ranges:
        if at < begin:
            gaps.append((at, begin))
        at = end
    return (*gaps, (at, size)) if at < size else tuple(gaps)
