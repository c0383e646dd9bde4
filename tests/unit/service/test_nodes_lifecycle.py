"""A node as people see it: since when it is as it is, and what counts as a loss."""

from __future__ import annotations

import pytest

from colibri.v1 import node_pb2, operator_pb2 as op
from ops.commands.workers import remote_line
from service.nodes.addresses import Place
from service.nodes.balancing import NodeBalancer
from service.nodes.dealing import Dealing
from service.nodes.lifecycle import Life, State
from service.nodes.link import Answer, Identity, Link
from service.nodes.member import Member


class Silent:
    """Is told and does nothing."""

    def admit(self, member: Member, link: Link) -> None: ...

    def changed(self) -> None: ...

    def told(self, link: Link, answer: Answer) -> None: ...

    def lost(self, link: Link) -> None: ...


def member() -> Member:
    def dial(address: str) -> Link:
        return Link(address, None, 1)

    return Member(Place("127.0.0.1", 9), Silent(), dial, Identity("f", "m", "d", "1", "avx2"), lambda address: "")


@pytest.mark.parametrize("what", [State.LOST, State.REFUSED])
def test_tries_do_not_restart_the_time_nor_hide_the_state(what: State) -> None:
    life = Life(0.0)
    assert life.move(what, 1.0, "a")
    for now in (2.0, 3.0):
        life.move(State.CONNECTING, now)
        assert life.shown is what
        assert not life.move(what, now + 0.5, "a")
        assert (life.shown, life.since) == (what, 1.0)
    life.move(State.CONNECTING, 4.0)
    life.move(State.READY, 4.5)
    assert (life.shown, life.since) == (State.READY, 4.5)


def test_who_leaves_as_it_said_is_no_loss() -> None:
    life = Life(0.0)
    life.move(State.READY, 1.0)
    life.move(State.DRAINING, 2.0, "it is shutting down")
    life.move(State.LOST, 3.0, "it ended the stream")
    life.move(State.CONNECTING, 4.0)
    life.move(State.LOST, 5.0, "refused")
    assert (life.left, life.losses) == (True, 0)
    life.move(State.CONNECTING, 6.0)
    life.move(State.READY, 7.0)
    life.move(State.LOST, 8.0, "gone")
    assert (life.left, life.losses) == (False, 1)


def test_another_node_at_the_address_begins_at_nothing() -> None:
    node = member()
    node.describe(node_pb2.NodeDescription(name="a", instance="1"))
    node.record.batches = node.life.losses = 3
    node.describe(node_pb2.NodeDescription(name="a", instance="2"))
    assert (node.record.batches, node.life.losses) == (3, 3)
    node.describe(node_pb2.NodeDescription(name="b", instance="3"))
    assert (node.record.batches, node.life.losses) == (0, 0)


def test_one_that_never_answered_is_not_reached_yet() -> None:
    lost = op.RemoteNode(address="a:1", model="m", state=op.REMOTE_NODE_STATE_LOST, reason="refused")
    assert "for m: not reached yet for 0 s: refused" in remote_line(lost)
    lost.name = "n"
    assert "for m: lost for 0 s" in remote_line(lost)


def test_nothing_moves_while_no_node_that_takes_shares_is_there() -> None:
    node = member()
    node.describe(node_pb2.NodeDescription(name="a", assignable=True))
    dealing = Dealing((4,), replicas=1, redeal_s=10.0, slack=0.0)
    balancer = NodeBalancer(dealing, lambda: [node], expert_bytes=1, here=False)
    assert "no node that takes what it is assigned is there" in balancer.balance([[1.0] * 4], dry_run=True, timeout=1.0).report.plan.reason
