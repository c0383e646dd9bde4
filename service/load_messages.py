"""How experts are used, as the operators' messages tell it, and back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from colibri.v1 import operator_pb2 as pb
from service.load import EXPERT_COUNTS, LAYER_COUNTS, Load

if TYPE_CHECKING:
    from service.load import Shares

_FIGURES = ("max_over_mean", "queue_variance", "longest_variance")


def load_message(load: Load, *, experts: bool, parts: Mapping[int | None, Shares | float], expert_bytes: int) -> pb.Load:
    """A load; `experts`: with what each had. `parts` and `expert_bytes`: as Load.bytes_by_node has them."""
    message = pb.Load(seconds=load.seconds)
    columns = {name: getattr(load, name).tolist() for name in (*LAYER_COUNTS, "runs", *_FIGURES)}
    if experts:
        columns |= {name: getattr(load, name).tolist() for name in EXPERT_COUNTS}
    for values in zip(*columns.values(), strict=True):
        message.layers.append(pb.LayerLoad(**dict(zip(columns, values, strict=True))))
    if not load.idle:
        for node, count in load.bytes_by_node(expert_bytes, parts).items():
            message.nodes.append(pb.NodeLoad(node=node, step_bytes=count))
    return message


def read_load(message: pb.Load) -> Load:
    """A load from a message with what each expert had."""
    import numpy as np

    columns = {name: np.array([getattr(layer, name) for layer in message.layers], np.uint64) for name in LAYER_COUNTS}
    columns |= {name: np.array([list(getattr(layer, name)) for layer in message.layers], np.uint64) for name in (*EXPERT_COUNTS, "runs")}
    return Load(seconds=message.seconds, **columns)


def read_places(placement: pb.Placement) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[layers][experts]: the nodes that hold the expert, its home first; none of an expert that is cut over nodes. Empty: no expert is
    whole on a node."""
    copies: dict[tuple[int, int], list[int]] = {}
    for copy in placement.copies:
        copies.setdefault((copy.layer, copy.expert), []).append(copy.node)
    return tuple(
        tuple((node, *copies.get((layer, expert), ())) for expert, node in enumerate(homes.nodes)) or ((),) * placement.experts
        for layer, homes in enumerate(placement.homes)
    )


def write_places(placement: pb.Placement, places: Sequence[Sequence[Sequence[int]]]) -> None:
    """The opposite."""
    for layer, experts in enumerate(places):
        whole = all(experts)
        placement.homes.append(pb.ExpertHomes(nodes=[nodes[0] for nodes in experts] if whole else ()))
        for expert, nodes in enumerate(experts):
            placement.copies.extend(pb.ExpertCopy(layer=layer, expert=expert, node=node) for node in nodes[1:])
