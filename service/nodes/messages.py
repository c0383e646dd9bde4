"""Nodes as operators are told of them."""

from __future__ import annotations

import time

from colibri.v1 import operator_pb2 as pb
from service.nodes.lifecycle import State
from service.nodes.member import Member
from service.nodes.nodes import Nodes

_STATES = {
    State.CONNECTING: pb.REMOTE_NODE_STATE_CONNECTING,
    State.READY: pb.REMOTE_NODE_STATE_READY,
    State.DRAINING: pb.REMOTE_NODE_STATE_DRAINING,
    State.LOST: pb.REMOTE_NODE_STATE_LOST,
    State.REFUSED: pb.REMOTE_NODE_STATE_REFUSED,
    State.GONE: pb.REMOTE_NODE_STATE_LOST,
}


def node_messages(model: str, nodes: Nodes) -> list[pb.RemoteNode]:
    """All that have been found, by name."""
    return [_message(model, member) for member in nodes.members]


def _message(model: str, member: Member) -> pb.RemoteNode:
    life, record, description = member.life, member.record, member.description
    message = pb.RemoteNode(
        model=model,
        name=description.name,
        address=str(member.place),
        state=_STATES[life.shown],
        in_state_seconds=time.monotonic() - life.since,
        reason="" if life.shown is State.READY else f"it has left ({life.reason})" if life.left else life.reason,
        isa=description.isa,
        lanes=description.lanes,
        share_bytes=description.share_bytes,
        batches=record.batches + record.hops,
        rows=record.pairs + record.hop_rows,
        compute_ms=1e3 * record.compute_s,
        round_trip_ms=1e3 * (record.round_trip_s + record.hop_s),
        losses=life.losses,
        rows_per_second=record.rate,
        hedges=record.hedges,
        failures=record.failures,
    )
    for share in description.shares:
        message.shares.add(layer=share.layer, experts=share.experts)
    for first, end in member.ranges:
        message.layers.add(first=first, end=end)
    return message
