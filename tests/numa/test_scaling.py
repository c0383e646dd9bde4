"""`colibri scale` while eight streams are read: no request fails and no token changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from service.client import Client
from tests.numa.kernel import node_of_cpu, threads
from tests.numa.models import model_path
from tests.numa.serving import PROMPTS, Server, Streams, answer, served

pytestmark = pytest.mark.numa("four-nodes")

TOKENS = 24


def per_node(server: Server) -> dict[int, int]:
    """Workers that compute, by the node all their threads are on."""
    nodes = node_of_cpu()
    homes = [{nodes[cpu] for thread in threads(pid) for cpu in thread.cpus} for pid in server.ready()]
    assert all(len(home) == 1 for home in homes)
    return dict(Counter(home.pop() for home in homes))


def test_scaling_every_node_from_1_to_3_to_2_while_streaming_costs_nothing(tmp_path: Path) -> None:
    options = "--workers-per-node 1 --threads-per-worker 1 --load memfd --placement rows"
    with served(model_path("tiny"), tmp_path, options) as server:
        with Client(server.target) as client:
            expected = [answer(client, which, tokens=TOKENS) for which in range(len(PROMPTS))]
        assert per_node(server) == dict.fromkeys(range(4), 1)
        with Streams(server.target, expected) as streams:
            streams.more()
            for node in range(4):  # one after the other: programs start so slowly here that many at once miss their deadlines
                server.command("scale", "--node", str(node), "--workers", "3")
                assert per_node(server)[node] == 3
            assert per_node(server) == dict.fromkeys(range(4), 3)
            streams.more()
            server.command("scale", "--workers", "2")
            assert per_node(server) == dict.fromkeys(range(4), 2)
            streams.more()
            server.command("scale", "--node", "3", "--workers", "1")
            assert per_node(server) == {0: 2, 1: 2, 2: 2, 3: 1}
            server.command("drain", "--node", "1")
            assert per_node(server) == {0: 2, 2: 2, 3: 1}
            streams.more()
        assert streams.failures == []
        assert streams.answers >= 4 * len(PROMPTS)
