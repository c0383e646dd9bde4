"""Which bytes of a model lie on which NUMA node: a pure plan. No placement changes a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Placement = Literal["auto", "experts", "rows", "replicate", "none"]


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


def whole_file(size: int, reason: str = "there is one node") -> PlacementPlan:
    """Everything in one piece, on no node in particular."""
    return PlacementPlan("none", (), (Extent(-1, 0, size),), reason)
