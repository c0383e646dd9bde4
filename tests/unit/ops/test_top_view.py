"""What `colibri top` draws, at every size of a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from colibri.v1 import operator_pb2 as pb
from ops.commands.operate import numbers
from ops.top_experts import heat_map, load_map
from ops.top_nodes import MOST
from ops.top_view import Frame, bar
from service.load import between
from service.load_messages import load_message
from tests.unit.service.loads import Counters

NODES = [pb.NumaNode(id=node, cpus=range(4 * node, 4 * node + 4), memory_bytes=8 << 30) for node in range(2)]


def counters(layers: int, experts: int) -> Counters:
    """After two steps in which the last experts had most."""
    queues = [list(range(1, experts + 1))] * layers
    return Counters.zero(layers, experts).step(queues, top_k=1).step(queues, top_k=1, rerouted=1, repeats=2)


def load(layers: int, experts: int, *, seconds: float = 2.0) -> pb.Load:
    parts = {0: 0.25, 1: 0.75}
    return load_message(between(counters(layers, experts), None, seconds=seconds), experts=True, parts=parts, expert_bytes=1 << 20)


def frame(*, layers: int = 4, experts: int = 8, workers: int = 2, window: float | None = None) -> Frame:
    crew = [
        pb.WorkerStats(
            worker=pb.Worker(index=place, node=place % 2, state=pb.WORKER_STATE_READY, pid=100 + place, lanes=[place], cpus=[place],
                             tasks_homed=10, tasks_local=9),
            tasks=500,
            busy=0.5,
        )
        for place in range(workers)
    ]
    model = pb.ModelStats(
        model="mix[tral]",
        state=pb.MODEL_STATE_SERVING,
        running=3,
        waiting=7,
        kv_blocks_held=25,
        kv_blocks=100,
        steps=100,
        tokens=800,
        step_ms=900.0,
        wait_ms=90.0,
        lanes=3,
        lanes_busy=0.62,
        tasks_homed=100,
        tasks_local=97,
        workers=crew,
        operations=[pb.OperationTime(operation="gate_up", ms=450.0), pb.OperationTime(operation="down", ms=225.0)],
        load=load(layers, experts),
        windows=[load(layers, experts, seconds=window)] if window else [],
    )
    machine = pb.TopologyResponse(
        nodes=NODES, placements=[pb.Placement(model="mix[tral]", placement="rows", load_mode="memfd", degraded=["mbind: refused"])]
    )
    return Frame(pb.WatchStatsResponse(uptime_seconds=3725, interval_seconds=2.0, models=[model]), machine, "unix:/x")


def drawn(what: Frame, *, width: int = 120, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(what)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_all_that_was_promised_is_shown() -> None:
    text = drawn(frame())
    for part in ("unix:/x", "up 1:02:05", "mix[tral]", "serving", "rows (memfd)", "400.0 tokens/s", "50.0 steps/s of 9.00 ms", "running 3",
                 "queue 7", "25%", "62%", "NUMA-local 97%", "NUMA node 0", "NUMA node 1", "worker 1 NUMA node 1",
                 "ready", "pid 101", "250 tasks/s", "local 90%",
                 "gate_up 50%", "degraded: mbind: refused", "max/mean 1.78", "variance 5.25", "longest 8.0/8",
                 "rerouted 1.4%", "active 8.0/8", "repeats 3%", "32.0 MiB a step  NUMA node 0 25%  NUMA node 1 75%", "routing of 2.0 s"):
        assert part in text, part


def test_a_moving_window_is_drawn_in_place_of_the_interval() -> None:
    text = drawn(frame(window=10.3))
    assert "routing of 10.3 s" in text
    assert "routing of 2.0 s" not in text


@pytest.mark.parametrize(("width", "figures"), [(120, 4), (74, 4), (73, 3), (59, 3), (58, 2), (30, 1)])
def test_figures_of_a_layer_follow_as_far_as_there_is_room(width: int, figures: int) -> None:
    lines = load_map(between(counters(2, 8), None, seconds=1.0), width=width, rows=10)
    names = ("max/mean", "variance", "longest", "rerouted")
    for line in lines[1:]:
        assert line.cell_len <= width
        assert [name for name in names if name in line.plain] == list(names[:figures])


@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (40, 10), (20, 5)])
def test_the_map_of_experts_fits_any_terminal(width: int, height: int) -> None:
    lines = load_map(between(counters(48, 128), None, seconds=1.0), width=width, rows=height)
    assert len(lines) <= height + 1
    assert width < 40 or all(line.cell_len <= width for line in lines[1:])
    text = drawn(frame(layers=48, experts=128), width=width, height=height)
    assert "layers a line" in text.replace("\n", " ") or height >= 60


def test_hot_and_cold_experts_stand_out() -> None:
    (_, line) = heat_map([[0, 10, 10, 60]], width=80, rows=10)
    assert line.plain.split("  max")[0].endswith(" ▂▂█")
    styles = [str(span.style) for span in line.spans]
    assert styles[:4] == ["blue", "green", "green", "red"]


def test_nothing_routed_is_no_map() -> None:
    assert heat_map([[0, 0], [0, 0]], width=80, rows=10) == []
    assert heat_map([], width=80, rows=10) == []


def node(name: str, *, batches: int = 0, rows: int = 0, trip_ms: float = 0.0, **fields: Any) -> pb.RemoteNode:
    shares = [pb.RemoteShare(layer=0, experts=[1, 2])]
    usual: dict[str, Any] = {"state": pb.REMOTE_NODE_STATE_READY, "shares": shares, "share_bytes": 3 << 20}
    address = f"{name or 'nobody'}:1"
    message = pb.RemoteNode(name=name, address=address, model="mix[tral]", batches=batches, rows=rows, round_trip_ms=trip_ms)
    message.MergeFrom(pb.RemoteNode(**(usual | fields)))
    return message


def with_nodes(now: list[pb.RemoteNode], earlier: list[pb.RemoteNode], *, width: int = 160, height: int = 60) -> list[str]:
    plain = frame()
    machine = pb.TopologyResponse(nodes=NODES, placements=plain.machine.placements, remote_nodes=now)
    text = drawn(Frame(plain.stats, machine, plain.place, pb.TopologyResponse(remote_nodes=earlier), 2.0), width=width, height=height)
    return [line for line in text.splitlines() if "expert node" in line or "more" in line]


def test_nodes_are_shown_with_what_they_did_since_the_frame_before() -> None:
    layered = node("c", batches=10, rows=100, trip_ms=20.0, layers=[pb.RemoteLayers(first=2, end=4)], hedges=5, losses=2, failures=1)
    now = [node("a", batches=300, rows=700, trip_ms=90.0), node("b", batches=50, rows=100), layered]
    first, second, third = with_nodes(now, [node("a", batches=100, rows=400, trip_ms=50.0), node("b", batches=50, rows=100), node("c")])
    assert " ".join(first.split()) == "expert node a ready 2 experts, 3.0 MiB 75% of rows 100 batches/s 0.20 ms a batch"
    assert " ".join(second.split()) == "expert node b ready 2 experts, 3.0 MiB 0% of rows 0 batches/s idle"
    told = "25% of rows 5 batches/s 2.00 ms a batch lost 2 hedged 5 failed 1"
    assert " ".join(third.split()) == f"expert node c ready layers 2-3, 3.0 MiB {told}"


def test_nodes_that_do_not_compute_come_first_and_say_why_harmlessly() -> None:
    lost = node("b\x1b[2J", state=pb.REMOTE_NODE_STATE_LOST, in_state_seconds=7, reason="UNAVAILABLE: [red]\nno", losses=1)
    unknown = node("", state=pb.REMOTE_NODE_STATE_LOST)
    first, second, third = with_nodes([node("a"), lost, unknown], [])
    assert r"expert node b\x1b[2J" in first
    assert " ".join(first.split()).endswith(r"lost for 7 s lost 1 UNAVAILABLE: [red]\nno")
    assert "expert node nobody:1  not reached yet" in second
    assert " ".join(third.split()) == "expert node a ready 2 experts, 3.0 MiB 0 batches/s idle"


def test_a_long_reason_leaves_the_others_their_room() -> None:
    lost = node("b", state=pb.REMOTE_NODE_STATE_LOST, reason="it went " * 50)
    first, second = with_nodes([node("a"), lost], [], width=100)
    assert first.startswith("  expert node b  lost  for 0 s  it went it went")
    assert len(first) <= 100
    assert " ".join(second.split()) == "expert node a ready 2 experts, 3.0 MiB 0 batches/s idle"


def test_a_node_that_counts_anew_is_not_taken_for_fast() -> None:
    [line] = with_nodes([node("a", batches=3, rows=3, trip_ms=1.0)], [node("a", batches=100, rows=100, trip_ms=50.0)])
    assert "0 batches/s  idle" in line


def test_of_many_nodes_some_are_shown_and_the_others_counted() -> None:
    lines = with_nodes([node(f"n{place}") for place in range(30)], [])
    assert len(lines) == MOST + 1
    assert lines[-1] == f"  and {30 - MOST} more (colibri topology has all)"


def test_a_server_without_nodes_has_no_such_lines() -> None:
    assert with_nodes([], []) == []


@pytest.mark.parametrize(("share", "text"), [(-1.0, "  0%"), (0.0, "  0%"), (0.5, " 50%"), (1.0, "100%"), (7.0, "100%")])
def test_a_bar_stays_in_its_bounds(share: float, text: str) -> None:
    plain = bar(share).plain
    assert plain.endswith(text)
    assert len(plain) == 20 + 5


@pytest.mark.parametrize(("values", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), ([2, 1], "1-2")])
def test_numbers_are_written_as_ranges(values: list[int], text: str) -> None:
    assert numbers(values) == text
