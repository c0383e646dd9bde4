"""A node that says what terminals obey, wherever it can say anything: what is shown of it stays on its line and harmless."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import generate_latest

from colibri.v1 import node_pb2, operator_pb2 as op
from engine_c import isa_name
from ops.commands.workers import remote_line
from service.client import generate_request
from service.nodes.lifecycle import State
from service.nodes.messages import node_messages
from service.nodes.nodes import Nodes
from service.wire import PROTOCOL
from tests.integration.serving import Serving, serving, until
from tests.multinode.impostor import ESCAPES, Impostor
from workers.layout import read_digest

NAMED = "n" + ESCAPES


@pytest.fixture
def impostor() -> Iterator[Callable[[node_pb2.NodeDescription, str], str]]:
    """Begins to answer so, and says where."""
    servers: list[grpc.Server] = []

    def begin(description: node_pb2.NodeDescription, word: str) -> str:
        servers.append(Impostor(description, [word]).server())
        port = servers[-1].add_insecure_port("127.0.0.1:0")
        servers[-1].start()
        return f"127.0.0.1:{port}"

    yield begin
    for server in servers:
        server.stop(None).wait()


def describe(model: Path) -> node_pb2.NodeDescription:
    """As a node with all of its experts would, but for the words that are its own."""
    fd = os.open(model, os.O_RDONLY)
    digest = read_digest(fd)
    os.close(fd)
    said = node_pb2.NodeDescription(name=NAMED, instance=ESCAPES, version=ESCAPES, model=ESCAPES, isa=isa_name(), protocol=PROTOCOL)
    said.model_digest, said.expert_format, said.lanes = digest, "int8", 1
    for layer in range(8):
        said.shares.add(layer=layer, experts=range(64))
    return said


def harmless(texts: list[str]) -> bool:
    return all(text.isprintable() for text in texts)


def nodes_of(front: Serving) -> Nodes:
    assert front.server.default.nodes is not None
    return front.server.default.nodes


@pytest.mark.parametrize(("word", "failure"), [("escapes", "it failed a batch: "), ("aborts", "INTERNAL: ")])
def test_a_computing_node_s_name_and_failures_are_escaped(
    tiny_model: Path, impostor: Callable[[node_pb2.NodeDescription, str], str], caplog: pytest.LogCaptureFixture, word: str, failure: str
) -> None:
    caplog.set_level(logging.INFO, "colibri")
    with serving(tiny_model, nodes=impostor(describe(tiny_model), word), nodes_fallback="file") as front:
        nodes = nodes_of(front)
        until(lambda: nodes.members[0].life.state is State.READY, "it is taken")
        front.client.complete(generate_request(tokens=[5, 6, 7], max_tokens=2))
        until(lambda: any(failure in message for message in caplog.messages), "it is given up")
        [told] = node_messages("m", nodes)
        assert harmless([told.name, told.reason, told.isa, *nodes.pool.notes, *caplog.messages])
        assert told.name.startswith(r"n\r\n2026-01-01 ERROR all is lost\x1b[2J")
        assert len(max(caplog.messages, key=len)) < 1000, "what others say is not all logged"
        assert b"\x1b" not in generate_latest(front.server.metrics.registry)


def test_a_refused_node_s_words_are_escaped(
    tiny_model: Path, impostor: Callable[[node_pb2.NodeDescription, str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "colibri")
    said = describe(tiny_model)
    said.model_digest = ESCAPES
    with serving(tiny_model, nodes=impostor(said, "failed"), nodes_fallback="off") as front:
        nodes = nodes_of(front)
        until(lambda: nodes.members[0].life.state is State.REFUSED, "it is refused")
        assert harmless([nodes.members[0].life.reason, nodes.remote.missing(), *caplog.messages])


def test_the_command_line_escapes_what_a_server_says_of_nodes() -> None:
    node = op.RemoteNode(name=NAMED, address=ESCAPES, model="m", state=op.REMOTE_NODE_STATE_REFUSED, reason=ESCAPES)
    assert remote_line(node).isprintable()
    node.state, node.isa = op.REMOTE_NODE_STATE_READY, ESCAPES
    assert remote_line(node).isprintable()
