"""A front end over node processes that run its layers: every token as without them, also when a node dies, returns or is another."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from colibri.v1 import experts_pb2, experts_pb2_grpc, inference_pb2 as pb, operator_pb2, operator_pb2_grpc
from ops.commands.workers import remote_line
from ops.random_model import SHAPES, make_model
from service.client import Client, generate_request, route_request
from service.nodes.lifecycle import State
from service.nodes.nodes import Nodes
from tests.integration.serving import PATIENCE, ROOT, Serving, reason, serving, until
from tests.integration.test_nodes import NodeProcess, Told, free_ports, likeliest, ready, told, wait_ready

PROMPTS = [range(3, 3 + length) for length in (5, 20, 60, 40)]  # all at once in one step, they are still one piece (service.nodes.pieces)
HALVES = {"low": "0-1", "high": "2-3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random model with a layer more, for longer texts."""
    path = tmp_path_factory.mktemp("model") / "four.colibri"
    make_model(path, replace(SHAPES["tiny"], layers=4, max_context=1024), quant="int8", seed=3)
    return path


@dataclass
class Cluster:
    """Nodes by name, each with an address of its own."""

    model: Path
    folder: Path
    nodes: dict[str, NodeProcess] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, *options: str) -> NodeProcess:
        """Starts one."""
        (self.ports[name],) = free_ports(1)
        command = [sys.executable, "-m", "ops.cli", "node", str(self.model), "--name", name, "--port", str(self.ports[name]), *options]
        self.nodes[name] = NodeProcess(name, command, self.folder / f"{name}.log")
        self.nodes[name].start()
        return self.nodes[name]

    def remove(self, name: str) -> None:
        self.nodes.pop(name).kill()

    def over(self, *names: str, **settings: object) -> AbstractContextManager[Serving]:
        """A front end of these nodes."""
        places = ",".join(f"127.0.0.1:{self.ports[name]}" for name in names)
        return serving(self.model, nodes=places, nodes_timeout_ms=1000, **settings)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(model, tmp_path_factory.mktemp("nodes"))
    for name, layers in HALVES.items():
        made.add(name, "--layers", layers, "--kv-memory", "64M")
    try:
        yield made
    finally:
        for name in list(made.nodes):
            made.remove(name)


def nodes_of(front: Serving) -> Nodes:
    nodes = front.server.default.nodes
    assert nodes is not None
    return nodes


def generate(client: Client, prompt: range, tokens: int) -> list[int]:
    answer = client.complete(generate_request(tokens=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True))
    return list(answer.token_ids)


@contextlib.contextmanager
def streams(target: str) -> Iterator[list[list[int]]]:
    """Long answers to all prompts, at once, under way; whole at the end."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    with Client(target, timeout=PATIENCE) as client:
        client.wait_ready(PATIENCE)  # so that they begin together

        def one(index: int) -> None:
            found[index] = generate(client, PROMPTS[index], LONG)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            for thread in threads:
                thread.join(PATIENCE)


def in_the_midst(front: Serving, steps: int = 40) -> None:
    """Returns when all streams have got some tokens and none has all."""
    begun = front.server.default.engine.steps
    until(lambda: front.stats().running == len(PROMPTS), "all streams run")
    until(lambda: front.server.default.engine.steps >= begun + steps, f"{steps} steps are done")
    assert front.stats().running == len(PROMPTS)


LONG = 900  # tokens: streams that begin one after another on a busy machine still run together for long


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Told]:
    with serving(model) as here:
        return told(here.target)


@pytest.fixture(scope="module")
def long_answers(model: Path) -> list[list[int]]:
    with serving(model) as here:
        return [generate(here.client, prompt, LONG) for prompt in PROMPTS]


def test_layers_on_nodes_change_no_bit_and_cost_two_hops_a_step(
    cluster: Cluster, expected: list[Told], long_answers: list[list[int]]
) -> None:
    with cluster.over(*HALVES, nodes_fallback="off", nodes_layers="0-3") as front:
        wait_ready(front, *HALVES)
        assert told(front.target) == expected
        with streams(front.target) as answers:
            in_the_midst(front)
        assert answers == long_answers
        nodes = nodes_of(front)
        steps = front.server.default.engine.steps
        assert nodes.remote.hops.hops == 2 * steps
        assert {member.name: member.record.hops for member in nodes.members} == {"low": steps, "high": steps}
        assert nodes.remote.totals.layers == 0  # none of the experts was asked for by itself
        front.wait_idle()


def test_long_prompts_go_over_the_nodes_in_pieces_and_change_no_bit(cluster: Cluster, model: Path) -> None:
    prompts = [range(3, 3 + length)[::-1] for length in (300, 140, 7)]  # backwards: no beginning is another's

    def answers(target: str) -> list[Told]:
        with Client(target, timeout=PATIENCE) as client, ThreadPoolExecutor(len(prompts)) as threads:
            client.wait_ready(PATIENCE)
            return list(threads.map(lambda prompt: likeliest(client, prompt, 12), prompts))

    with serving(model) as here:
        expected = answers(here.target)
    with cluster.over(*HALVES, nodes_fallback="off", nodes_layers="0-3") as front:
        wait_ready(front, *HALVES)
        assert answers(front.target) == expected
        hops = {member.name: member.record.hops for member in nodes_of(front).members}
        assert hops["low"] == hops["high"] > front.server.default.engine.steps


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_node_its_layers_are_run_here_until_it_is_back(
    cluster: Cluster, long_answers: list[list[int]], how: signal.Signals
) -> None:
    node = cluster.nodes["high"]
    with cluster.over(*HALVES) as front:
        wait_ready(front, *HALVES)
        with streams(front.target) as answers:
            in_the_midst(front)
            node.signal(how)
        try:
            assert answers == long_answers
            wait_ready(front, "low")
            hops = nodes_of(front).remote.hops.hops
            with streams(front.target) as answers:
                in_the_midst(front)
                assert front.stats().preemptions > 0  # by then all has been computed anew
                if how == signal.SIGKILL:
                    node.kill()
                    node.start()
                else:
                    node.signal(signal.SIGCONT)
                wait_ready(front, *HALVES)
            assert answers == long_answers
            assert nodes_of(front).remote.hops.hops > hops
        finally:
            node.signal(signal.SIGCONT)


@pytest.mark.parametrize(("name", "how"), [("low", signal.SIGKILL), ("high", signal.SIGKILL), ("high", signal.SIGTERM)])
def test_a_node_that_comes_back_empty_costs_no_token(
    cluster: Cluster, long_answers: list[list[int]], name: str, how: signal.Signals
) -> None:
    node = cluster.nodes[name]
    with cluster.over(*HALVES, nodes_fallback="off", lane_grace=PATIENCE) as front:
        wait_ready(front, *HALVES)
        with streams(front.target) as answers:
            in_the_midst(front)
            node.signal(how)
            assert node.popen is not None
            node.popen.wait(PATIENCE)
            node.start()
        assert answers == long_answers
        assert front.stats().preemptions >= len(PROMPTS)
        front.wait_idle()


def test_prefixes_that_were_on_a_lost_node_are_not_reused(cluster: Cluster, long_answers: list[list[int]]) -> None:
    node = cluster.nodes["low"]
    with cluster.over(*HALVES, nodes_fallback="off", lane_grace=PATIENCE) as front:
        wait_ready(front, *HALVES)
        longest = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
        for restart in (False, True, False):
            if restart:
                node.kill()
                node.start()
                until(lambda: nodes_of(front).pool.table.ranged == {2, 3}, "the loss is seen")
                wait_ready(front, *HALVES)
            before = front.stats().pool.hit_tokens
            assert generate(front.client, PROMPTS[longest], LONG) == long_answers[longest]
        assert front.stats().pool.hit_tokens > before  # the last request found what the one after the restart had left


def test_another_node_with_the_same_layers_takes_over(cluster: Cluster, long_answers: list[list[int]]) -> None:
    cluster.add("spare", "--layers", "1-3", "--kv-memory", "64M")
    try:
        with cluster.over(*HALVES, "spare", nodes_fallback="off") as front:
            wait_ready(front, *HALVES, "spare")
            with streams(front.target) as answers:
                in_the_midst(front)
                used = {leg.key for leg in nodes_of(front).remote.hops.legs}
                (victim,) = [m.name for m in nodes_of(front).members if m.name != "low" and m.holder and m.holder.key in used]
                cluster.nodes[victim].kill()
            assert answers == long_answers
            assert ready(front) == {"low", "high", "spare"} - {victim}
    finally:
        cluster.remove("spare")
        cluster.nodes["high"].kill()
        cluster.nodes["high"].start()


def test_without_node_and_file_calls_end_typed(cluster: Cluster, long_answers: list[list[int]]) -> None:
    node = cluster.nodes["high"]
    with cluster.over(*HALVES, nodes_fallback="off", lane_grace=0.5) as front:
        wait_ready(front, *HALVES)
        node.kill()
        until(lambda: nodes_of(front).pool.table.ranged == {0, 1}, "the loss is seen")
        with Client(front.target, timeout=PATIENCE) as client, pytest.raises(grpc.RpcError) as lost:
            client.complete(generate_request(tokens=[5, 6, 7], max_tokens=4))
        assert reason(lost.value) == "NODES_LOST"
        assert "no node runs layers 2-3" in (lost.value.details() or "")
        node.start()
        wait_ready(front, *HALVES)
        assert generate(front.client, PROMPTS[0], LONG) == long_answers[0]


def test_layers_on_one_node_and_experts_of_the_others_on_another(cluster: Cluster, long_answers: list[list[int]]) -> None:
    cluster.add("experts", "--share", "1/1")
    try:
        with cluster.over("low", "experts", nodes_fallback="off", nodes_layers="0-1") as front:
            wait_ready(front, "low", "experts")
            with streams(front.target) as answers:
                in_the_midst(front)
            assert answers == long_answers
            assert nodes_of(front).remote.hops.hops == front.server.default.engine.steps
            assert nodes_of(front).remote.totals.layers == 2 * front.server.default.engine.steps
    finally:
        cluster.remove("experts")


def test_two_front_ends_have_blocks_of_their_own(cluster: Cluster, long_answers: list[list[int]]) -> None:
    with cluster.over(*HALVES, nodes_fallback="off") as one, cluster.over(*HALVES, nodes_fallback="off") as other:
        wait_ready(one, *HALVES)
        wait_ready(other, *HALVES)
        with streams(one.target) as first, streams(other.target) as second:
            in_the_midst(one)
        assert first == second == long_answers


def test_what_needs_every_router_here_is_refused(cluster: Cluster) -> None:
    policy = pb.RoutingPolicy(damping=pb.RoutingPolicy.DAMPING_HEAT)
    with cluster.over(*HALVES, damping="heat", operator_socket=str(cluster.folder / "o.sock")) as front:
        wait_ready(front, *HALVES)
        client = front.client
        asked: list[Callable[[], object]] = [
            lambda: client.complete(generate_request(tokens=[5, 6, 7], max_tokens=4, routing=policy)),
            lambda: client.score(tokens=[5, 6, 7], routing=policy),
            lambda: client.route(route_request(tokens=[5, 6, 7])),
        ]
        for ask in asked:
            with pytest.raises(grpc.RpcError) as refused:
                ask()
            assert (refused.value.code(), reason(refused.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "LAYERS_ELSEWHERE")
            assert "nodes run layers 0-3 whole" in (refused.value.details() or "")
        answer = client.complete(generate_request(tokens=[5, 6, 7], max_tokens=4))  # the default is for other times
        assert answer.finish.routed == 0
        with grpc.insecure_channel(f"unix:{cluster.folder / 'o.sock'}") as channel:
            operator = operator_pb2_grpc.OperatorStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                operator.SetRoutingPolicy(operator_pb2.SetRoutingPolicyRequest(policy=policy), timeout=PATIENCE)
            assert reason(refused.value) == "LAYERS_ELSEWHERE"
            remote = operator.Topology(operator_pb2.TopologyRequest(), timeout=PATIENCE).remote_nodes
            assert {(node.name, layers.first, layers.end) for node in remote for layers in node.layers} == {("low", 0, 2), ("high", 2, 4)}
            assert "layers 0-1, " in remote_line(next(node for node in remote if node.name == "low"))


def test_a_further_model_is_loaded_without_nodes(cluster: Cluster) -> None:
    settings = {"nodes_layers": "0-3", "nodes_fallback": "off", "nodes_replicas": 2, "nodes_slack": 0.5}
    with cluster.over(*HALVES, operator_socket=str(cluster.folder / "o.sock"), **settings) as front:
        with grpc.insecure_channel(f"unix:{cluster.folder / 'o.sock'}") as channel:
            request = operator_pb2.LoadModelRequest(path=str(cluster.model), name="second", kv_memory=16 << 20)
            operator_pb2_grpc.OperatorStub(channel).LoadModel(request, timeout=PATIENCE)
        asked = [generate_request(tokens=[5, 6, 7], max_tokens=4, model=name, seed=1) for name in ("", "second")]
        first, second = (front.client.complete(request).token_ids for request in asked)
        assert first == second


def test_requests_under_way_that_cannot_go_on_when_layers_go_to_nodes_end_typed(cluster: Cluster, long_answers: list[list[int]]) -> None:
    policy = pb.RoutingPolicy(damping=pb.RoutingPolicy.DAMPING_HEAT)
    node = cluster.nodes["low"]
    node.kill()
    with cluster.over("low") as front:
        damped: list[grpc.RpcError] = []

        def ask() -> None:
            with pytest.raises(grpc.RpcError) as refused, Client(front.target, timeout=PATIENCE) as client:
                client.complete(generate_request(tokens=[5, 6, 7], max_tokens=500, ignore_eos=True, routing=policy))
            damped.append(refused.value)

        front.gate.shut()
        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: front.stats().running == 1, "it runs")
        node.start()
        wait_ready(front, "low")
        front.gate.open()
        assert generate(front.client, PROMPTS[0], LONG) == long_answers[0]
        thread.join(PATIENCE)
        assert reason(damped[0]) == "LAYERS_ELSEWHERE"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_memory": 160 << 20}, "KV blocks, we have"),
        ({"kv_format": "f32"}, "its KV cache is in bf16, ours in f32"),
    ],
)
def test_nodes_whose_kv_memory_does_not_fit_are_refused(cluster: Cluster, settings: dict[str, object], says: str) -> None:
    with cluster.over("low", **settings) as front:
        until(lambda: {member.life.state for member in nodes_of(front).members} == {State.REFUSED}, "it is refused")
        assert all(says in member.life.reason for member in nodes_of(front).members)
    assert "refused" in cluster.nodes["low"].log.read_text()


def test_a_node_whose_blocks_others_have_is_refused_until_they_are_free(cluster: Cluster, long_answers: list[list[int]]) -> None:
    with cluster.over("low", kv_memory=80 << 20) as other:
        with cluster.over("low", kv_memory=80 << 20) as one:
            until(lambda: {*ready(one), *ready(other)} == {"low"}, "one of them has it")
            first, second = (one, other) if ready(one) else (other, one)
            (member,) = nodes_of(second).members
            until(lambda: member.life.state is State.REFUSED, "the other is refused")
            assert "of this node's" in member.life.reason
            assert generate(second.client, PROMPTS[0], LONG) == long_answers[0]
            assert generate(first.client, PROMPTS[0], LONG) == long_answers[0]
        wait_ready(other, "low")
        assert generate(other.client, PROMPTS[0], LONG) == long_answers[0]


def opening(**fields: object) -> experts_pb2.ExecuteRequest:
    return experts_pb2.ExecuteRequest(open=experts_pb2.OpenStream(front_end="test", **fields))  # type: ignore[arg-type]


def layers(number: int) -> experts_pb2.ExecuteRequest:
    parts = [experts_pb2.LayerSequence(start=0, rows=1, blocks=array("i", [0]).tobytes())]
    hidden = SHAPES["tiny"].hidden
    return experts_pb2.ExecuteRequest(layers=experts_pb2.LayerBatch(id=number, first=0, end=2, sequences=parts, x=bytes(4 * hidden)))


def test_streams_that_ask_for_what_is_not_there_are_refused(cluster: Cluster) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.ports['low']}") as channel:
        stub = experts_pb2_grpc.ExpertsStub(channel)
        cases = [
            (opening(kv_blocks=1 << 30, kv_format="bf16"), "KV_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED),
            (opening(kv_blocks=1, kv_format="f32"), "KV_FORMAT_DIFFERS", grpc.StatusCode.FAILED_PRECONDITION),
        ]
        for asked, why, code in cases:
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Execute(iter([asked]), timeout=PATIENCE))
            assert (refused.value.code(), reason(refused.value)) == (code, why)
        _, failed = stub.Execute(iter([opening(), layers(4)]), timeout=PATIENCE)
        assert (failed.failed.id, failed.failed.code) == (4, 3)
        assert "without kv_blocks" in failed.failed.message


def test_a_later_stream_of_the_same_process_has_the_blocks_of_the_earlier(cluster: Cluster) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.ports['low']}") as channel:
        stub = experts_pb2_grpc.ExpertsStub(channel)
        go_on = threading.Event()

        def earlier() -> Iterator[experts_pb2.ExecuteRequest]:
            yield opening(kv_blocks=2000, kv_format="bf16", instance="process")
            yield layers(1)
            go_on.wait(PATIENCE)
            yield layers(2)

        answers = stub.Execute(earlier(), timeout=PATIENCE)
        total = next(answers).opened.kv_blocks
        assert next(answers).result.id == 1
        again = opening(kv_blocks=total, kv_format="bf16", instance="process")
        opened, result = stub.Execute(iter([again, layers(7)]), timeout=PATIENCE)
        assert (opened.opened.kv_blocks_free, result.result.id) == (0, 7)
        go_on.set()
        assert "taken over" in next(answers).failed.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--layers", "0-1", "--share", "1/2"), "share 1/2 and layers 0-1 are given"),
        (("--layers", "0-4"), "there is no layer 4, the model has 4"),
        (("--layers", "1-0"), "1-0 is the wrong way round"),
        (("--layers", "0-1", "--kv-memory", "1"), "no room for KV memory"),
        (("--share", "1/2", "--kv-memory", "1M"), "kv_memory is for layers"),
    ],
)
def test_a_node_with_senseless_layers_does_not_start(model: Path, options: tuple[str, ...], says: str) -> None:
    command = [sys.executable, "-m", "ops.cli", "node", str(model), "--port", "0", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode != 0
    assert says in ended.stderr
