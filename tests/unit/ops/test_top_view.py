"""What `colibri top` draws, at every size of a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from colibri.v1 import operator_pb2 as pb
from ops.commands.operate import numbers
from ops.top_experts import heat_map, load_map
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
                 "queue 7", "25%", "62%", "NUMA-local 97%", "node 0", "node 1", "worker 1", "ready", "pid 101", "250 tasks/s", "local 90%",
                 "gate_up 50%", "degraded: mbind: refused", "max/mean 1.78", "variance 5.25", "longest 8.0/8",
                 "rerouted 1.4%", "active 8.0/8", "repeats 3%", "32.0 MiB a step  node 0 25%  node 1 75%", "routing of 2.0 s"):
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


@pytest.mark.parametrize(("share", "text"), [(-1.0, "  0%"), (0.0, "  0%"), (0.5, " 50%"), (1.0, "100%"), (7.0, "100%")])
def test_a_bar_stays_in_its_bounds(share: float, text: str) -> None:
    plain = bar(share).plain
    assert plain.endswith(text)
    assert len(plain) == 20 + 5


@pytest.mark.parametrize(("values", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), ([2, 1], "1-2")])
def test_numbers_are_written_as_ranges(values: list[int], text: str) -> None:
    assert numbers(values) == text
