"""Which node runs which layers whole. Pure.

What a node has computed of a sequence is in its KV memory alone, so that a leg that has begun is kept as long as its stream is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.nodes.holders import Holder
from service.spans import Range, merge_ranges, show_ranges


@dataclass(frozen=True, slots=True)
class Leg:
    """Layers first <= layer < end are run by the stream `key`: one hop of a step."""

    first: int
    end: int
    key: int


def plan_legs(holders: Sequence[Holder], layers: int, *, kept: Iterable[Leg] = ()) -> tuple[Leg, ...]:
    """Legs for all layers that a node runs, ascending, as few as can be. kept: legs so far; those whose stream is gone count for nothing.

    From each layer on that nobody has yet goes the node that goes furthest, ties to the first name.
    """
    there = {holder.key: holder for holder in holders}
    legs = [leg for leg in kept if leg.key in there]
    free = [True] * layers
    for leg in legs:
        free[leg.first : leg.end] = [False] * (leg.end - leg.first)
    layer = 0
    while layer < layers:
        gap = next((end for end in range(layer, layers) if not free[end]), layers)
        end, key = max(((min(_reach(holder, layer), gap), -place) for place, holder in enumerate(holders)), default=(0, 0))
        if end > layer:
            legs.append(Leg(layer, end, holders[-key].key))
            layer = end
        else:
            layer += 1
    return tuple(sorted(legs, key=lambda leg: leg.first))


def _reach(holder: Holder, layer: int) -> int:
    """Behind the last of the layers that it runs from this one on without a gap; 0 if not even this one."""
    return next((end for first, end in holder.ranges if first <= layer < end), 0)


def show_layers(layers: Iterable[int]) -> str:
    """Numbers, as they are written in settings."""
    return show_ranges(merge_ranges([(layer, layer + 1) for layer in layers]))


def layers_of(ranges: Iterable[Range]) -> frozenset[int]:
    """The layers in ranges."""
    return frozenset(layer for first, end in ranges for layer in range(first, end))
