"""What `colibri rebalance` prints: NUMA nodes by number, processes that compute for a server by name."""

from __future__ import annotations

import pytest

from colibri.v1 import operator_pb2 as op
from ops.commands.rebalance import show
from ops.commands.workers import remote_line


@pytest.mark.parametrize(
    ("names", "kind", "source", "target"), [([], "NUMA node", "0", "1"), (["left", "right"], "expert node", "left", "right")]
)
def test_moves_and_copies_name_their_nodes(
    names: list[str], kind: str, source: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = op.RebalanceResponse(
        reason="it pays",
        moves=[op.ExpertMove(layer=2, expert=3, source=0, target=1)],
        copies=[op.ExpertCopy(layer=1, expert=4, node=1)],
        dropped=[op.ExpertCopy(layer=0, expert=5, node=0)],
        nodes=names,
    )
    show(report, dry_run=True)
    printed = capsys.readouterr().out
    assert "would be done: it pays" in printed
    assert f"layer 2 expert 3: {kind} {source} to {target}" in printed
    assert f"layer 1 expert 4: a copy on {kind} {target}" in printed
    assert f"layer 0 expert 5: no copy on {kind} {source} any more" in printed


def test_a_node_is_told_with_what_it_holds_and_does() -> None:
    node = op.RemoteNode(
        name="n1",
        address="host:1",
        model="m",
        state=op.REMOTE_NODE_STATE_READY,
        lanes=1,
        losses=1,
        shares=[op.RemoteShare(layer=0, experts=[1, 2]), op.RemoteShare(layer=1, experts=[0])],
        rows=700,
        rows_per_second=12.4,
    )
    line = remote_line(node)
    assert line.startswith("expert node n1 at host:1, for m: ready")
    assert "3 experts" in line
    assert "1 lane (" in line
    assert line.endswith("lost 1 time")
    assert "700 rows, 12 a second" in line
