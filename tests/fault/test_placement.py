"""Placements on pretended nodes: one that is there and one that is not, where the kernel refuses the policy. Results must not change."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.harness import Decoding, config, descriptors
from workers.placement import Placement
from workers.team import Team
from workers.topology import Node, Topology, read_topology

MISSING = 63


def two_nodes() -> Topology:
    """This machine's node 0 and another with the same CPUs that does not exist."""
    here = read_topology()
    memory = here.memory_limit_bytes // 2
    return replace(here, nodes=(Node(0, here.cpus_allowed, memory), Node(MISSING, here.cpus_allowed, memory)), distances=())


@pytest.mark.parametrize("wish", ["experts", "rows", "replicate"])
def test_a_placement_changes_no_token_and_serves_degraded(wish: Placement, model: Path, undisturbed: list[list[int]]) -> None:
    fds = descriptors()
    with Team.open(model, replace(config(2), load_mode="memfd", placement=wish), machine=two_nodes()) as team:
        assert Decoding().run(team.session) == undisturbed
        found = team.describe()
        assert (found.placement.placement, found.placement.nodes) == (wish, (0, MISSING))
        assert [share.node for share in found.report.shares] == [0, MISSING]
        size = model.stat().st_size
        assert sum(share.bytes for share in found.report.shares) == (2 if wish == "replicate" else 1) * size
        assert [text for text in found.degraded if text.startswith(f"mbind to NUMA node {MISSING}: ")], found.degraded
        assert any(text.endswith(f"bytes of NUMA node {MISSING} lie on other nodes") for text in found.degraded), found.degraded
        assert len(found.degraded) == len(set(found.degraded))
        assert {lane.node for lane in found.lanes} == {0, MISSING}
        homed = sum(lane.homed for lane in found.lanes)
        assert (homed == 0) == (wish == "replicate"), "each process of a replicated model sees one node"
        held = [os.fstat(fd).st_blocks * 512 for fd in team.image.fds]
        assert sum(held) < sum(share.bytes for share in found.report.shares) + (1 << 20), "holes take no memory"
    assert not Counter(descriptors()) - Counter(fds), "nothing new; what others had open may go"


def test_kv_heads_are_bound_and_found(model: Path) -> None:
    with Team.open(model, replace(config(1), load_mode="memfd", placement="rows"), machine=two_nodes()) as team:
        assert [share.bytes for share in team.kv_memory.shares()] == [0, 0], "nothing is touched before it is used"
        Decoding().run(team.session, steps=3)
        here, missing = team.kv_memory.shares()
        assert (here.on_node, here.bytes > 0) == (here.bytes, True)
        assert (missing.on_node, missing.bytes > 0) == (0, True)
        assert any(text.startswith("KV memory: mbind") for text in team.describe().degraded)
