"""Operators rebalance a server's experts while it answers: on this machine's node and one that is pretended (tests/fault/test_rebalancing).

Real nodes are in tests/numa.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from colibri.v1 import operator_pb2 as op
from ops.random_model import ModelShape, make_model
from service.load_messages import read_places
from tests.fault.test_placement import MISSING, two_nodes
from tests.fault.test_rebalancing import pretended
from tests.integration.operating import Operating, Streams, operating, undisturbed
from tests.integration.serving import PATIENCE, until

__all__ = ["pretended"]  # a fixture for every test here
TOKENS = 400
LAYERS, EXPERTS = 4, 8
Places = tuple[tuple[tuple[int, ...], ...], ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("balanced") / "model.colibri"
    shape = ModelShape(layers=LAYERS, hidden=256, heads=4, kv_heads=2, ffn=448, experts=EXPERTS, top_k=2, vocab=1024, max_context=1024)
    make_model(path, shape, quant="int8")
    return path


@pytest.fixture
def operated(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operating]:
    monkeypatch.setattr("workers.team.read_topology", two_nodes)
    with operating(model, tmp_path, load="memfd", placement="experts", kv_memory=64 << 20, metrics_port=0) as running:
        yield running


def placement(operated: Operating) -> op.Placement:
    (found,) = operated.stub.Topology(op.TopologyRequest(), timeout=PATIENCE).placements
    return found


def rebalance(operated: Operating, **how: object) -> op.RebalanceResponse:
    return operated.stub.Rebalance(op.RebalanceRequest(**how), timeout=PATIENCE)  # type: ignore[arg-type]


def wait_until_known(operated: Operating, rows: int) -> None:
    """Until the moving window that rebalancing reads has so many rows."""

    def known() -> bool:
        messages = operated.stub.WatchStats(op.WatchStatsRequest(interval_ms=50, windows=[60]), timeout=PATIENCE)
        (stats,) = next(messages).models
        messages.cancel()
        return bool(stats.windows) and stats.windows[0].layers[0].rows >= rows

    until(known, "the window has the traffic")


def test_experts_move_by_the_traffic_and_no_token_changes(operated: Operating) -> None:
    expected = undisturbed(operated.serving, TOKENS)
    wait_until_known(operated, 8 * (TOKENS - 1))
    before = placement(operated)
    assert [len(set(homes.nodes)) for homes in before.homes] == [2] * LAYERS
    dry = rebalance(operated, dry_run=True, replicas=2)
    assert dry.copies
    assert not dry.done
    assert dry.max_over_mean_after < dry.max_over_mean_before
    assert read_places(placement(operated)) == read_places(before)
    streams = Streams(operated.serving.target, TOKENS)
    streams.start()
    report = rebalance(operated, replicas=2)
    assert report.done, report.reason
    assert streams.join() == expected
    assert not streams.errors
    after = read_places(placement(operated))
    assert after == applied(read_places(before), report)
    assert report.bytes == (len(report.moves) + len(report.copies)) * before.expert_bytes
    back = rebalance(operated)
    assert len(back.dropped) == len(report.copies)
    assert undisturbed(operated.serving, TOKENS) == expected


def applied(places: Places, report: op.RebalanceResponse) -> Places:
    """Places after what a report says was done."""
    found = {(layer, expert): list(nodes) for layer, experts in enumerate(places) for expert, nodes in enumerate(experts)}
    for move in report.moves:
        assert found[move.layer, move.expert][0] == move.source
        found[move.layer, move.expert][0] = move.target
    for copy in report.copies:
        found[copy.layer, copy.expert].append(copy.node)
    return tuple(tuple(tuple(found[layer, expert]) for expert in range(EXPERTS)) for layer in range(LAYERS))


def test_bytes_of_a_step_are_told_by_node(operated: Operating) -> None:
    undisturbed(operated.serving, 20)
    messages = operated.stub.WatchStats(op.WatchStatsRequest(interval_ms=50), timeout=PATIENCE)
    (stats,) = next(messages).models
    messages.cancel()
    size, homes = placement(operated).expert_bytes, placement(operated).homes
    expected = dict.fromkeys((0, MISSING), 0.0)
    for layer, own in zip(stats.load.layers, homes, strict=True):
        for node, active in zip(own.nodes, layer.active, strict=True):
            expected[node] += active * size / layer.steps
    assert {node.node: node.step_bytes for node in stats.load.nodes} == pytest.approx(expected)


def test_a_rebalancing_does_not_hold_up_the_end(operated: Operating, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed(operated.serving, TOKENS)
    wait_until_known(operated, 8 * (TOKENS - 1))
    rebalancer = operated.serving.server.default.team._rebalancer
    held = rebalancer._closing.wait
    monkeypatch.setattr(rebalancer, "_replicate", lambda _: held(PATIENCE))  # each copy takes until it is told to stop
    call = operated.stub.Rebalance.future(op.RebalanceRequest(replicas=2), timeout=PATIENCE)
    until(rebalancer._turn.locked, "it has begun")
    operated.serving.loop.call_soon_threadsafe(operated.serving.server.request_stop)
    until(operated.serving.loop.is_closed, "the server has ended", timeout=PATIENCE / 2)
    assert isinstance(call.exception(), grpc.RpcError)


def test_a_server_that_is_told_to_rebalances_by_itself(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.team.read_topology", two_nodes)
    settings = {"rebalance": "auto", "rebalance_interval": 1.0, "rebalance_replicas": 2}
    with operating(model, tmp_path, load="memfd", placement="experts", kv_memory=64 << 20, **settings) as operated:
        before = read_places(placement(operated))
        expected = undisturbed(operated.serving, TOKENS)
        until(lambda: undisturbed(operated.serving, TOKENS) == expected and read_places(placement(operated)) != before, "it has rebalanced")
        assert undisturbed(operated.serving, TOKENS) == expected
