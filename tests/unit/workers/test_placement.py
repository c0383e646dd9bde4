"""Plans of which bytes lie on which node, for models and machines of every shape."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from ops.random_model import ModelShape, make_model
from workers import placement
from workers.layout import Expert, Layout, LayoutError, Matrix, make_layout, read_layout
from workers.placement import PAGE, Placement, PlacementError, PlacementPlan, plan_placement
from workers.topology import Node, Topology

GIB = 1 << 30


def machine(count: int, free: int | None = None) -> Topology:
    """Nodes with numbers that have gaps, two CPUs each."""
    nodes = tuple(Node(3 * i, (2 * i, 2 * i + 1), 64 * GIB, free) for i in range(count))
    return Topology(nodes, tuple(range(2 * count)), 64 * GIB * count)


def layout(*, experts: list[int], hidden: int, ffn: int, block: int = 576, texts: int = 5000, backbone: int = 2) -> Layout:
    """A container as the writer lays it out: header and texts, each layer's matrices, then all experts, at multiples of 4096."""
    at = texts
    matrices, layers = [], []

    def page() -> int:
        return -(-at // 4096) * 4096

    for _ in range(backbone):
        matrices.append(Matrix(page(), -(-hidden // 32), -(-hidden // 32) * block))
        at = matrices[-1].end + 300  # norms and the like
    for count in experts:
        layer = []
        for _ in range(count):
            gate_up = Matrix(page(), -(-ffn // 32), 2 * -(-hidden // 32) * block)
            layer.append(Expert(gate_up, Matrix(gate_up.end, -(-hidden // 32), -(-ffn // 32) * block)))
            at = layer[-1].down.end
        layers.append(tuple(layer))
    return Layout(at, tuple(matrices), tuple(layers))


def node_at(plan: PlacementPlan, byte: int) -> int:
    return plan.extents[bisect_right(plan.extents, byte, key=lambda extent: extent.offset) - 1].node


shapes = st.builds(
    layout,
    experts=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    hidden=st.integers(1, 700),
    ffn=st.integers(1, 700),
    block=st.sampled_from([576, 1088, 2048, 4096]),
    texts=st.integers(64, 100_000),
    backbone=st.integers(0, 4),
)


@settings(deadline=None)
@given(shapes, st.integers(2, 8), st.sampled_from(["auto", "experts", "rows"]))
def test_extents_cover_the_file_exactly_at_pages(model: Layout, count: int, wish: Placement) -> None:
    plan = plan_placement(model, machine(count), wish)
    assert plan.extents[0].offset == 0
    assert all(extent.offset % PAGE == 0 and extent.bytes > 0 for extent in plan.extents)
    ends = [extent.offset + extent.bytes for extent in plan.extents]
    assert ends == [*(extent.offset for extent in plan.extents[1:]), model.size]
    assert all(a.node != b.node for a, b in zip(plan.extents, plan.extents[1:], strict=False))
    assert {extent.node for extent in plan.extents} <= set(plan.nodes) == {3 * i for i in range(count)}


def check_cut(plan: PlacementPlan, matrix: Matrix) -> None:
    """Unit u is on node i where i * units / N <= u, but for the half page next to a cut."""
    count = len(plan.nodes)
    starts = [matrix.units * i // count for i in range(count)]
    for i, node in enumerate(plan.nodes):
        begin = matrix.offset + starts[i] * matrix.unit_bytes + PAGE // 2
        end = matrix.offset + ([*starts[1:], matrix.units][i]) * matrix.unit_bytes - PAGE // 2
        for byte in (begin, (begin + end) // 2, end - 1) if begin < end else ():
            assert node_at(plan, byte) == node


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(2, 8))
def test_rows_cuts_every_matrix_where_tasks_are_cut(model: Layout, count: int) -> None:
    plan = plan_placement(model, machine(count), "rows")
    assert plan.placement == "rows"
    for matrix in (*model.backbone, *(m for layer in model.layers for expert in layer for m in (expert.gate_up, expert.down))):
        check_cut(plan, matrix)


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(2, 8))
def test_experts_stay_whole_and_every_layer_is_spread_over_the_nodes(model: Layout, count: int) -> None:
    plan = plan_placement(model, machine(count), "experts")
    assert plan.placement == "experts"
    for matrix in model.backbone:
        check_cut(plan, matrix)
    held = dict.fromkeys(plan.nodes, 0)
    for layer in model.layers:
        if len(layer) == 1:
            check_cut(plan, layer[0].gate_up)
            continue
        counts = dict.fromkeys(plan.nodes, 0)
        for expert in layer:
            begin, end = expert.gate_up.offset, expert.down.end
            if end - begin <= PAGE:  # may share its only page
                return
            node = node_at(plan, (begin + end) // 2)
            assert node_at(plan, begin) == node == node_at(plan, end - 1 - PAGE // 2)
            counts[node] += 1
            held[node] += expert.bytes
        assert max(counts.values()) - min(counts.values()) <= 1
    assert max(held.values()) - min(held.values()) <= max(expert.bytes for layer in model.layers for expert in layer)


@given(shapes, st.integers(2, 8))
def test_replicate_gives_every_node_the_whole_file(model: Layout, count: int) -> None:
    plan = plan_placement(model, machine(count), "replicate")
    assert [(extent.node, extent.offset, extent.bytes) for extent in plan.extents] == [(node, 0, model.size) for node in plan.nodes]


BIG = layout(experts=[8] * 4, hidden=1024, ffn=3584)


@pytest.mark.parametrize("wish", ["auto", "experts", "rows", "replicate", "none"])
def test_one_node_places_nothing(wish: Placement) -> None:
    plan = plan_placement(BIG, machine(1), wish)
    assert (plan.placement, plan.nodes) == ("none", ())
    assert plan.extents == placement.whole_file(BIG.size).extents


def test_rows_are_balanced_to_a_few_panels() -> None:
    plan = plan_placement(BIG, machine(4), "auto")
    held = [plan.bytes_on(node) for node in plan.nodes]
    assert max(held) - min(held) < BIG.size // 100
    assert plan.reason == "every matrix has panels for all 4 NUMA nodes, so each token reads from all their memories at once"


def test_auto_keeps_experts_whole_where_panels_are_too_few() -> None:
    plan = plan_placement(layout(experts=[8], hidden=64, ffn=256), machine(4), "auto")
    assert plan.placement == "experts"
    assert plan.reason == "a matrix has 2 panels, too few for 4 NUMA nodes, so experts stay whole"


def test_auto_keeps_experts_whole_where_rows_take_too_many_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_EXTENTS", 100)
    plan = plan_placement(BIG, machine(4), "auto")
    assert plan.placement == "experts"
    assert "mappings in every process" in plan.reason
    monkeypatch.setattr(placement, "MAX_EXTENTS", 10)
    with pytest.raises(PlacementError, match=r"placement rows takes \d+ pieces, 10 are possible; use placement replicate or none"):
        plan_placement(BIG, machine(4), "rows")


def test_nodes_without_cpus_or_memory_hold_no_weights() -> None:
    nodes = (Node(0, (0,), GIB), Node(1, (), 64 * GIB), Node(2, (1,), 0), Node(3, (2,), GIB))
    assert plan_placement(BIG, Topology(nodes, (0, 1, 2), GIB), "rows").nodes == (0, 3)


def test_a_full_node_is_left_out_and_named() -> None:
    topology = machine(3, free=GIB)
    full = replace(topology.nodes[1], free_bytes=10 << 20)
    plan = plan_placement(BIG, replace(topology, nodes=(topology.nodes[0], full, topology.nodes[2])), "rows")
    assert plan.nodes == (0, 6)
    assert plan.reason.endswith("; left out for want of free memory: NUMA node 3")


def test_too_little_memory_everywhere_is_refused_when_asked_for_and_said_by_auto() -> None:
    topology = machine(2, free=100 << 20)
    sentence = r"a share of the weights takes up to \d+ MiB of a NUMA node and NUMA node \d has 100 MiB free"
    with pytest.raises(PlacementError, match=rf"placement rows is not possible: {sentence}; free memory or use placement none"):
        plan_placement(BIG, topology, "rows")
    plan = plan_placement(BIG, topology, "auto")
    assert plan.placement == "none"
    assert plan.reason.endswith("so the weights are not placed")


def test_the_layout_of_a_real_container_is_the_engines(tmp_path: Path) -> None:
    from ops.container import Container

    path = tmp_path / "model.colibri"
    make_model(path, ModelShape(layers=2, hidden=96, heads=4, kv_heads=2, ffn=160, experts=3, top_k=2, vocab=500), quant="int4", seed=1)
    with path.open("rb") as file, Container.open(path) as container:
        found = read_layout(file.fileno())
        assert found.size == path.stat().st_size
        assert [len(layer) for layer in found.layers] == [3, 3]
        for number, layer in enumerate(found.layers):
            for e, expert in enumerate(layer):
                entry = container.entry(f"layers.{number}.experts.{e}")
                assert (expert.gate_up.offset, expert.down.end) == (entry.offset, entry.offset + entry.length)
        entries = [entry for entry in container.tensors.values() if entry.layout == "p32"]
        assert sorted((m.offset, m.end) for m in found.backbone) == sorted((e.offset, e.offset + e.length) for e in entries)


def test_what_is_no_container_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text, cause in ((b"", "no Colibri container"), (b"COLIBRI\0" + bytes(100), "does not fit its length")):
        path.write_bytes(text)
        with path.open("rb") as file, pytest.raises(LayoutError, match=cause):
            read_layout(file.fileno())
    entry = {"name": "embed", "layout": "p32", "format": "int8", "shape": [64, 64], "offset": 8192}
    with pytest.raises(LayoutError, match="a tensor lies outside the file"):
        make_layout(9000, {"tensors": [entry]})
