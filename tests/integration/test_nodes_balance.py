"""Nodes that take any share: dealt, evened out by the load, copied, given up and taken up again, while answers keep every token."""

from __future__ import annotations

import signal
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from colibri.v1 import operator_pb2 as op
from ops.random_model import ModelShape, make_model
from service.nodes.nodes import Nodes
from tests.integration.operating import Operating, Streams, operating, undisturbed
from tests.integration.serving import PATIENCE, Serving, serving, until
from tests.integration.test_nodes import NodeProcess, free_ports, ready

LAYERS, EXPERTS, TOKENS = 4, 8, 150
ALL = frozenset((layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS))
Pairs = frozenset[tuple[int, int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("balanced") / "model.colibri"
    shape = ModelShape(layers=LAYERS, hidden=256, heads=4, kv_heads=2, ffn=448, experts=EXPERTS, top_k=2, vocab=1024, max_context=1024)
    make_model(path, shape, quant="int8")
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with serving(model) as here:
        return undisturbed(here, TOKENS)


@dataclass
class Auto:
    """Nodes without a share of their own, at addresses that are kept for them."""

    model: Path
    folder: Path
    ports: list[int]
    nodes: dict[str, NodeProcess] = field(default_factory=dict)

    @property
    def places(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, *numbers: int) -> None:
        for number in numbers:
            name = f"n{number}"
            options = ["--name", name, "--share", "auto", "--port", str(self.ports[number]), "--drain-grace", "20"]
            command = [sys.executable, "-m", "ops.cli", "node", str(self.model), *options]
            self.nodes[name] = NodeProcess(name, command, self.folder / f"{name}.log")
            self.nodes[name].start()

    def leave(self, *numbers: int) -> None:
        for number in numbers:
            self.nodes[f"n{number}"].signal(signal.SIGTERM)

    def gone(self, *numbers: int) -> None:
        for number in numbers:
            popen = self.nodes.pop(f"n{number}").popen
            assert popen is not None
            assert popen.wait(PATIENCE) == 0

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()


@pytest.fixture
def auto(model: Path, tmp_path: Path) -> Iterator[Auto]:
    made = Auto(model, tmp_path, free_ports(5))
    try:
        yield made
    finally:
        made.close()


@contextmanager
def front(auto: Auto, folder: Path, **settings: object) -> Iterator[Operating]:
    usual = {"nodes": auto.places, "nodes_fallback": "off", "nodes_resolve_s": 0.2, "nodes_redeal_s": 2.0, "workers_per_node": 0}
    with operating(auto.model, folder, **(usual | settings)) as running:
        yield running


def nodes_of(serving: Serving) -> Nodes:
    nodes = serving.server.default.nodes
    assert nodes is not None
    return nodes


def held(serving: Serving) -> dict[str, Pairs]:
    return {member.name: member.held for member in nodes_of(serving).members if member.name in ready(serving)}


def dealt(serving: Serving, *names: str, copies: int = 1) -> bool:
    """Whether these nodes, and no others, hold every expert so many times, about evenly."""
    found = held(serving)
    settled = nodes_of(serving).pool.dealing.settled and found.keys() == set(names)
    even = copies * len(ALL) / len(names)
    return settled and sum(map(len, found.values())) == copies * len(ALL) and all(0 < len(pairs) <= 1.5 * even for pairs in found.values())


def wait_dealt(serving: Serving, *names: str, copies: int = 1) -> None:
    until(lambda: dealt(serving, *names, copies=copies), f"experts are dealt over {names}", timeout=PATIENCE)
    assert frozenset().union(*held(serving).values()) == ALL


def pairs_by_node(serving: Serving) -> dict[str, int]:
    return {member.name: member.record.pairs for member in nodes_of(serving).members}


def spread(serving: Serving, expected: list[list[int]]) -> float:
    """max/mean of the rows that nodes computed for the same answers."""
    before = pairs_by_node(serving)
    assert undisturbed(serving, TOKENS) == expected
    done = [count - before[name] for name, count in pairs_by_node(serving).items() if count]
    return max(done) * len(done) / sum(done)


@contextmanager
def never_lacking(serving: Serving) -> Iterator[None]:
    """Every expert has a holder whenever a step begins."""
    lacking: list[tuple[int, int]] = []

    def look(_: int) -> None:
        lacking.extend(nodes_of(serving).pool.table.uncovered([EXPERTS] * LAYERS))

    serving.gate.fault = look
    yield
    serving.gate.fault = lambda _: None
    assert not lacking


def wait_known(operated: Operating, rows: int) -> None:
    """Until the moving window that balancing reads has so many rows."""

    def known() -> bool:
        messages = operated.stub.WatchStats(op.WatchStatsRequest(interval_ms=50, windows=[60]), timeout=PATIENCE)
        (stats,) = next(messages).models
        messages.cancel()
        return bool(stats.windows) and stats.windows[0].layers[0].rows >= rows

    until(known, "the window has the traffic")


def rebalance(operated: Operating, **how: object) -> op.RebalanceResponse:
    return operated.stub.Rebalance(op.RebalanceRequest(**how), timeout=PATIENCE)  # type: ignore[arg-type]


def test_experts_move_to_where_they_even_the_load_and_no_token_changes(auto: Auto, tmp_path: Path, expected: list[list[int]]) -> None:
    auto.start(0, 1, 2)
    with front(auto, tmp_path) as operated:
        serving = operated.serving
        wait_dealt(serving, "n0", "n1", "n2")
        before = held(serving)
        uneven = spread(serving, expected)
        wait_known(operated, 8 * (TOKENS - 1))
        dry = rebalance(operated, dry_run=True)
        assert dry.moves or dry.copies, dry.reason
        assert not dry.done
        assert list(dry.nodes) == ["n0", "n1", "n2"]
        assert held(serving) == before
        with never_lacking(serving):
            streams = Streams(serving.target, TOKENS)
            streams.start()
            report = rebalance(operated)
            assert streams.join() == expected
        assert not streams.errors
        assert report.done, report.reason
        assert held(serving) == applied(before, report)
        assert report.max_over_mean_after < report.max_over_mean_before
        assert spread(serving, expected) < 1 + 0.75 * (uneven - 1)
        again = rebalance(operated, dry_run=True)
        assert [*again.moves, *again.copies, *again.dropped] == [], again.reason


def applied(before: dict[str, Pairs], report: op.RebalanceResponse) -> dict[str, Pairs]:
    """What nodes hold after what a report says was done."""
    found = {name: set(pairs) for name, pairs in before.items()}
    for copy in report.dropped:
        found[report.nodes[copy.node]].remove((copy.layer, copy.expert))
    for move in report.moves:
        found[report.nodes[move.source]].remove((move.layer, move.expert))
        found[report.nodes[move.target]].add((move.layer, move.expert))
    for copy in report.copies:
        found[report.nodes[copy.node]].add((copy.layer, copy.expert))
    return {name: frozenset(pairs) for name, pairs in found.items()}


def test_a_front_end_that_is_told_to_balances_by_itself(auto: Auto, tmp_path: Path, expected: list[list[int]]) -> None:
    auto.start(0, 1, 2)
    with front(auto, tmp_path, nodes_balance="auto", rebalance_interval=1.0, metrics_port=0) as operated:
        serving = operated.serving
        wait_dealt(serving, "n0", "n1", "n2")
        with never_lacking(serving):
            until(lambda: undisturbed(serving, TOKENS) == expected and nodes_of(serving).balancer.moved, "it has balanced")
            assert undisturbed(serving, TOKENS) == expected
        until(lambda: told_alike(operated), "metrics and topology agree")
        assert metrics(serving)["colibri_node_moves_total"] > 0
        assert metrics(serving)["colibri_nodes_max_over_mean"] > 1


def told_alike(operated: Operating) -> bool:
    """Whether everything says that the nodes hold what they hold, and work."""
    told, pairs = metrics(operated.serving), held(operated.serving)
    topology = operated.stub.Topology(op.TopologyRequest(), timeout=PATIENCE)
    remote = {node.name: node for node in topology.remote_nodes if node.name in pairs}
    counts = {name: sum(len(share.experts) for share in node.shares) for name, node in remote.items()}
    return (
        counts == {name: told["colibri_node_experts", name] for name in pairs} == {name: len(own) for name, own in pairs.items()}
        and all(told["colibri_node_held_bytes", name] == node.share_bytes > 0 for name, node in remote.items())
        and all(told["colibri_node_pairs_per_second", name] > 0 < node.rows_per_second for name, node in remote.items())
    )


def metrics(serving: Serving) -> dict[object, float]:
    """Values by name, and of those of nodes by name and node."""
    with urllib.request.urlopen(f"http://127.0.0.1:{serving.server.metrics.port}/metrics", timeout=PATIENCE) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("colibri_node")]
    return {(s.name, s.labels["node"]) if "node" in s.labels else s.name: s.value for s in samples}


def test_with_replicas_a_killed_node_fails_no_call(auto: Auto, tmp_path: Path, expected: list[list[int]]) -> None:
    auto.start(0, 1, 2)
    with front(auto, tmp_path, nodes_replicas=2, nodes_timeout_ms=1000) as operated:
        serving = operated.serving
        wait_dealt(serving, "n0", "n1", "n2", copies=2)
        streams = Streams(serving.target, TOKENS)
        streams.start()
        auto.nodes["n1"].kill()
        assert streams.join() == expected
        assert not streams.errors
        wait_dealt(serving, "n0", "n2", copies=2)
        auto.start(1)
        wait_dealt(serving, "n0", "n1", "n2", copies=2)
        assert undisturbed(serving, TOKENS) == expected


def test_nodes_come_and_go_and_no_token_changes(auto: Auto, tmp_path: Path, expected: list[list[int]]) -> None:
    auto.start(0, 1, 2)
    with front(auto, tmp_path) as operated:
        serving = operated.serving
        wait_dealt(serving, "n0", "n1", "n2")
        with never_lacking(serving):
            streams = Streams(serving.target, TOKENS)
            streams.start()
            auto.start(3, 4)
            assert streams.join() == expected
            wait_dealt(serving, "n0", "n1", "n2", "n3", "n4")
            streams = Streams(serving.target, TOKENS)
            streams.start()
            auto.leave(0, 2, 4)
            assert streams.join() == expected
            wait_dealt(serving, "n1", "n3")
            assert undisturbed(serving, TOKENS) == expected
        assert not streams.errors
        auto.gone(0, 2, 4)


def test_a_restarted_node_gets_its_own_share_again(auto: Auto, tmp_path: Path, expected: list[list[int]]) -> None:
    auto.start(0, 1, 2)
    with front(auto, tmp_path, nodes_redeal_s=30.0) as operated:
        serving = operated.serving
        wait_dealt(serving, "n0", "n1", "n2")
        before, deals = held(serving), nodes_of(serving).pool.dealing.deals
        auto.nodes["n2"].kill()
        until(lambda: ready(serving) == {"n0", "n1"}, "it is missed")
        auto.start(2)
        until(lambda: held(serving) == before, "it holds what it held")
        assert nodes_of(serving).pool.dealing.deals == deals
        assert undisturbed(serving, TOKENS) == expected


def test_a_further_front_end_leaves_what_was_balanced(auto: Auto, tmp_path: Path, expected: list[list[int]]) -> None:
    auto.start(0, 1, 2)
    with front(auto, tmp_path) as operated:
        wait_dealt(operated.serving, "n0", "n1", "n2")
        assert undisturbed(operated.serving, TOKENS) == expected
        wait_known(operated, 8 * (TOKENS - 1))
        report = rebalance(operated)
        assert report.done, report.reason
        balanced = held(operated.serving)
        with front(auto, tmp_path, operator_socket="none") as further:
            until(lambda: nodes_of(further.serving).pool.dealing.settled, "it has looked at the nodes")
            assert undisturbed(further.serving, TOKENS) == expected
            assert held(further.serving) == held(operated.serving) == balanced
            assert nodes_of(operated.serving).pool.dealing.foreign == 0


def test_front_ends_that_see_different_nodes_have_all_experts_both(auto: Auto, tmp_path: Path, expected: list[list[int]]) -> None:
    auto.start(0, 1, 2)
    few = ",".join(f"127.0.0.1:{port}" for port in auto.ports[1:3])
    with front(auto, tmp_path) as all_seen, front(auto, tmp_path, nodes=few, operator_socket="none") as few_seen:
        fronts = [all_seen.serving, few_seen.serving]

        def covered(serving: Serving) -> bool:
            return nodes_of(serving).pool.dealing.settled and frozenset[tuple[int, int]]().union(*held(serving).values()) == ALL

        until(
            lambda: ready(fronts[0]) == {"n0", "n1", "n2"} and ready(fronts[1]) == {"n1", "n2"} and all(map(covered, fronts)),
            "both have all",
        )
        streams = [Streams(serving.target, TOKENS) for serving in fronts]
        for each in streams:
            each.start()
        assert [each.join() for each in streams] == [expected, expected]
        assert [each.errors for each in streams] == [[], []]
