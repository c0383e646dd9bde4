"""Placement on machines that are not four equal nodes: without memory somewhere, without CPUs somewhere, uneven, two nodes, one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.numa.machine import Machine
from tests.numa.teams import compute, kv_shares, local_share, shares, team

pytestmark = pytest.mark.numa("one-node", "two-nodes", "node-without-memory", "node-without-cpus", "uneven")


def test_weights_lie_on_the_nodes_that_have_cpus_and_memory(machine: Machine, record_property: Callable[[str, object], None]) -> None:
    homes = tuple(i for i, node in enumerate(machine.nodes) if node.cpus and node.memory)
    with team("none") as alone:
        expected = compute(alone)
    with team("auto", workers=1) as placed:
        assert np.array_equal(compute(placed), expected)
        plan = placed.image.placement
        assert plan.nodes == (homes if len(homes) > 1 else ())
        assert placed.describe().degraded == ()
        if plan.nodes:
            assert min(shares(placed.image).values()) >= 0.99
            assert min(share for _, share in kv_shares(placed).values()) >= 0.99
            local, homed = local_share(placed)
            record_property("tasks done on the node of their weights", f"{local / homed:.0%} of {homed}")
