"""A front end over three node processes with a third of the experts each: every bit as without them, also while nodes die and return."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from ops.random_model import SHAPES, make_model
from service.client import Client, generate_request
from service.nodes.lifecycle import State
from service.operator_messages import placement_message
from tests.integration.serving import PATIENCE, ROOT, Serving, reason, serving, until

Told = list[tuple[int, float]]


@dataclass
class NodeProcess:
    """`colibri node` on a socket of loopback that it keeps over restarts."""

    name: str
    command: list[str]
    log: Path
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {"COLIBRI_LOAD": "map", "COLIBRI_WORKERS_PER_NODE": "0"}
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(self.command, cwd=ROOT, env=os.environ | settings, stdout=out, stderr=out)

    def signal(self, number: signal.Signals) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.popen is not None
        self.popen.wait(PATIENCE)


@dataclass
class Thirds:
    """Three nodes and the model they serve."""

    model: Path
    places: str
    nodes: dict[str, NodeProcess] = field(default_factory=dict)


@pytest.fixture(scope="module")
def thirds(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thirds]:
    folder = tmp_path_factory.mktemp("nodes")
    ports = free_ports(3)
    made = Thirds(tiny_model, ",".join(f"127.0.0.1:{port}" for port in ports))
    for index, port in enumerate(ports, 1):
        name = f"n{index}"
        options = ["--name", name, "--share", f"{index}/3", "--port", str(port)]
        made.nodes[name] = NodeProcess(name, [sys.executable, "-m", "ops.cli", "node", str(tiny_model), *options], folder / f"{name}.log")
        made.nodes[name].start()
    try:
        yield made
    finally:
        for node in made.nodes.values():
            node.kill()


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def over(thirds: Thirds, **settings: object) -> AbstractContextManager[Serving]:
    """A front end of these nodes."""
    return serving(thirds.model, nodes=thirds.places, nodes_timeout_ms=1000, **settings)


def ready(front: Serving) -> set[str]:
    nodes = front.server.default.nodes
    assert nodes is not None
    return {member.name for member in nodes.members if member.life.state is State.READY}


def wait_ready(front: Serving, *names: str) -> None:
    until(lambda: ready(front) == set(names), f"{names} compute", timeout=PATIENCE)


def told(target: str) -> list[Told]:
    """The likeliest tokens' probabilities, as bits."""
    found = []
    with Client(target, timeout=PATIENCE) as client:
        for length in (1, 7, 33, 130):
            found.append(likeliest(client, range(3, 3 + length), 12))
    return found


def likeliest(client: Client, prompt: range, tokens: int) -> Told:
    """The likeliest tokens at each position of an answer, with their log-probabilities."""
    request = generate_request(tokens=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, top_logprobs=20)
    return [(top.token_id, top.logprob) for token in client.complete(request).logprobs for top in token.top]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[Told]:
    with serving(tiny_model) as here:
        return told(here.target)


def test_experts_on_nodes_change_no_bit(thirds: Thirds, expected: list[Told]) -> None:
    with over(thirds, nodes_fallback="off") as front:
        wait_ready(front, "n1", "n2", "n3")
        assert told(front.target) == expected
        nodes = front.server.default.nodes
        assert nodes is not None
        assert all(member.record.pairs > 0 for member in nodes.members)
        assert nodes.remote.totals.fallback_pairs == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_node_the_file_stands_in_until_it_is_back(thirds: Thirds, expected: list[Told], how: signal.Signals) -> None:
    node = thirds.nodes["n2"]
    with over(thirds) as front:
        wait_ready(front, "n1", "n2", "n3")
        node.signal(how)
        try:
            assert told(front.target) == expected
            wait_ready(front, "n1", "n3")
        finally:
            if how == signal.SIGKILL:
                node.kill()
                node.start()
            else:
                node.signal(signal.SIGCONT)
        wait_ready(front, "n1", "n2", "n3")
        nodes = front.server.default.nodes
        assert nodes is not None
        if how == signal.SIGSTOP:  # one that is dead may be missed before a step asks it for anything
            assert nodes.remote.totals.fallback_pairs > 0
        before = nodes.remote.totals.fallback_pairs
        assert told(front.target) == expected
        assert nodes.remote.totals.fallback_pairs == before


def test_without_node_and_file_calls_end_typed_and_go_on_when_it_is_back(thirds: Thirds, expected: list[Told]) -> None:
    node = thirds.nodes["n3"]
    with over(thirds, nodes_fallback="off", lane_grace=1.0) as front:
        wait_ready(front, "n1", "n2", "n3")
        node.kill()
        begin = time.monotonic()
        with Client(front.target, timeout=PATIENCE) as client, pytest.raises(grpc.RpcError) as lost:
            client.complete(generate_request(tokens=[5, 6, 7], max_tokens=4))
        assert reason(lost.value) == "NODES_LOST"
        assert time.monotonic() - begin < 10
        node.start()
        wait_ready(front, "n1", "n2", "n3")
        assert told(front.target) == expected


def test_a_node_that_drains_is_asked_no_more(thirds: Thirds, expected: list[Told], monkeypatch: pytest.MonkeyPatch) -> None:
    node = thirds.nodes["n1"]
    with over(thirds) as front:
        wait_ready(front, "n1", "n2", "n3")
        nodes = front.server.default.nodes
        assert nodes is not None
        member = next(member for member in nodes.members if member.name == "n1")
        until(lambda: member.link is not None and member.link.waits, "its news is waited for")
        monkeypatch.setattr("service.nodes.pool._ASK_EVERY", 3600.0)
        node.signal(signal.SIGTERM)
        try:
            until(lambda: member.life.state is State.DRAINING, "it is seen to drain before it has left", timeout=PATIENCE)
            asked = member.record.batches
            assert told(front.target) == expected
            assert (member.record.batches, member.record.failures) == (asked, 0)
            assert node.popen is not None
            assert node.popen.wait(PATIENCE) == 0
            until(lambda: member.life.shown is State.LOST, "it has left")
            assert (member.life.left, member.life.losses) == (True, 0)
        finally:
            node.start()
        monkeypatch.undo()
        wait_ready(front, "n1", "n2", "n3")


def test_what_no_node_holds_is_told(thirds: Thirds, caplog: pytest.LogCaptureFixture) -> None:
    one = thirds.places.split(",")[0]
    with caplog.at_level("INFO", "colibri.nodes"), serving(thirds.model, nodes=one) as front:
        nodes, hosted = front.server.default.nodes, front.server.default
        assert nodes is not None
        wait_ready(front, "n1")
        half = "experts a layer are held by no node: computed here from the file"
        until(lambda: [half in note for note in nodes.pool.notes] == [True], "it has settled", timeout=PATIENCE)
        until(lambda: half in caplog.text, "it is logged")
        placement = placement_message(hosted)
        assert list(placement.degraded)[-1:] == nodes.pool.notes
        assert placement.bytes < hosted.model.info.file_bytes


def test_who_is_refused_hears_that_the_nodes_that_are_there_are_too_few(thirds: Thirds) -> None:
    one = thirds.places.split(",")[0]
    with serving(thirds.model, nodes=one, nodes_fallback="off", lane_grace=0.1) as front:
        wait_ready(front, "n1")
        with Client(front.target, timeout=PATIENCE) as client, pytest.raises(grpc.RpcError) as lost:
            client.complete(generate_request(tokens=[5, 6, 7], max_tokens=4))
        assert reason(lost.value) == "NODES_LOST"
        words = r"no node holds expert \d+ of layer 0 and \d+ more; n1 is ready: start nodes that hold them, or set nodes_fallback file"
        assert re.search(words, lost.value.details() or "")


def test_a_name_that_means_nothing_is_told_once(thirds: Thirds, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, object] = {"nodes_insecure": True, "nodes_fallback": "off", "nodes_resolve_s": 0.1}
    with serving(thirds.model, nodes="dns:///nod.invalid:50061", **settings) as front:
        nodes = front.server.default.nodes
        assert nodes is not None
        until(lambda: any("requests wait" in note for note in nodes.pool.notes), "what lacks has settled", timeout=PATIENCE)
        trouble = nodes.pool.unresolved
        assert trouble.startswith("the name nod.invalid does not resolve")
        assert trouble in nodes.pool.notes
        assert trouble in nodes.remote.missing()
        assert caplog.text.count(trouble) == 1


@pytest.fixture
def short(thirds: Thirds, tmp_path: Path) -> Iterator[Callable[[float], Thirds]]:
    """A node of all experts that ends streams which are idle for so many seconds."""
    begun: list[NodeProcess] = []

    def begin(seconds: float) -> Thirds:
        [port] = free_ports(1)
        options = ["--name", "n1", "--share", "1/1", "--port", str(port), "--idle-timeout", str(seconds)]
        command = [sys.executable, "-m", "ops.cli", "node", str(thirds.model), *options]
        begun.append(NodeProcess("n1", command, tmp_path / "n1.log"))
        begun[-1].start()
        return Thirds(thirds.model, f"127.0.0.1:{port}", {"n1": begun[-1]})

    yield begin
    for node in begun:
        node.kill()


def test_an_idle_front_end_keeps_its_streams(short: Callable[[float], Thirds]) -> None:
    node = short(1.5)
    with over(node, nodes_fallback="off") as front:
        wait_ready(front, "n1")
        nodes = front.server.default.nodes
        assert nodes is not None
        until(lambda: len(nodes.members[0].record.looks) >= 5, "it has been idle for 4 s")
        assert nodes.members[0].life.losses == 0
        front.client.complete(generate_request(tokens=[5, 6, 7], max_tokens=4))
        assert nodes.members[0].life.losses == 0


def test_a_front_end_whose_streams_are_ended_opens_others_and_no_request_fails(short: Callable[[float], Thirds]) -> None:
    node = short(0.2)  # less than between two looks at how the node is, which would keep them
    with over(node, nodes_fallback="off") as front:
        wait_ready(front, "n1")
        nodes = front.server.default.nodes
        assert nodes is not None
        for losses in (1, 2):
            until(lambda wanted=losses: nodes.members[0].life.losses >= wanted, "the node has ended an idle stream")  # type: ignore[misc]
            front.client.complete(generate_request(tokens=[5, 6, 7], max_tokens=4))
        assert "said nothing for 0.2 s" in node.nodes["n1"].log.read_text()


def test_another_model_is_refused_by_name(thirds: Thirds, tmp_path: Path) -> None:
    other = tmp_path / "other.colibri"
    make_model(other, SHAPES["tiny"], quant="int8", seed=2)
    with serving(other, nodes=thirds.places) as front:
        nodes = front.server.default.nodes
        assert nodes is not None
        until(lambda: {member.life.state for member in nodes.members} == {State.REFUSED}, "all are refused")
        assert all("digest" in member.life.reason for member in nodes.members)
        assert {member.name for member in nodes.members} == {"n1", "n2", "n3"}
