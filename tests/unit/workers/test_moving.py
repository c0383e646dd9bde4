"""What is moved of an expert, what takes the place of what, and what loads are believed: the arithmetic beside moves and copies."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, strategies as st

from engine_c import Part
from tests.unit.workers.test_placement import layout, machine
from workers.automatic import LEAST_TOKENS, LoadAverage
from workers.mapping import HUGE_PAGE
from workers.moving import Range, move, range_of, whole_pages
from workers.parts import PART_RECORD, overlay, read_record, within
from workers.placement import PAGE, Extent, fine_extents, plan_placement

MIB = 1 << 20


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=4))
def test_overlaid_parts_cover_the_same_bytes_with_the_new_ones_in_place(sizes: list[int], wishes: list[tuple[int, int]]) -> None:
    parts, at = [], 0
    for fd, size in enumerate(sizes):
        parts.append(Part(fd, fd, at, size))
        at += size
    over: list[Part] = []
    for begin, size in wishes:
        inside = next((part for part in parts if part.offset <= begin and begin + size <= part.offset + part.bytes), None)
        if inside is not None and not any(new.offset < begin + size and begin < new.offset + new.bytes for new in over):
            over.append(Part(100 + len(over), -1, begin, size))
    owner = [next(part.fd for part in [*over, *parts] if part.offset <= byte < part.offset + part.bytes) for byte in range(at)]
    found = overlay(parts, over)
    assert [part.fd for part in found for _ in range(part.bytes)] == owner
    assert [part.offset for part in found] == [sum(part.bytes for part in found[:i]) for i in range(len(found))]
    for begin, size in wishes:
        got = within(found, begin, size)
        assert [part.fd for part in got for _ in range(part.bytes)] == owner[begin : begin + size]


def test_record_brings_its_descriptor() -> None:
    data = PART_RECORD.pack(3, 1 << 40, 4096)
    assert read_record(data, b"\x07\0\0\0") == Part(7, 3, 1 << 40, 4096)


def test_small_expert_shares_no_huge_page_with_its_neighbours() -> None:
    small = layout(experts=[8, 8], hidden=256, ffn=512, block=1088)
    plan = plan_placement(small, machine(2), "experts")
    fine = fine_extents(plan, small)
    assert [(extent.offset, extent.node) for extent in fine if extent.offset == 0] == [(0, plan.extents[0].node)]
    assert sum(extent.bytes for extent in fine) == small.size
    begins = {extent.offset for extent in fine}
    for layer in small.layers:
        for expert in layer:
            own = range_of(expert, small.size)
            assert own.offset in begins
            assert own.offset % PAGE == 0
            assert own.end >= expert.down.end
            assert whole_pages(own, fine) == own
    assert fine_extents(plan_placement(small, machine(2), "rows"), small) == plan_placement(small, machine(2), "rows").extents


def test_large_experts_keep_huge_pages_across_them() -> None:
    large = layout(experts=[8], hidden=2048, ffn=2048, block=1088)
    plan = plan_placement(large, machine(2), "experts")
    assert fine_extents(plan, large) == plan.extents


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        ((0, 8), (0, 8)),
        ((1.5, 7), (2, 8)),  # most of the first huge page is a neighbour's, of the last its own
        ((0.5, 7.5), (0, 8)),
        ((5, 9), (6, 9)),  # small pages from 8 on: it ends where it ends
        ((8.25, 9.5), (8.25, 9.5)),
    ],
)
def test_huge_page_goes_with_whoever_has_most_of_it(wanted: tuple[float, float], got: tuple[float, float]) -> None:
    filled = [Extent(0, 0, 8 * MIB), Extent(0, 8 * MIB, MIB), Extent(1, 9 * MIB, 4 * MIB)]
    begin, end = (int(at * MIB) for at in wanted)
    assert HUGE_PAGE == 2 * MIB
    found = whole_pages(Range(begin, end - begin), filled)
    assert (found.offset / MIB, found.end / MIB) == got


@given(st.integers(0, 40), st.integers(8, 40))
def test_neighbours_share_out_every_huge_page(first: int, size: int) -> None:
    filled = [Extent(0, 0, 64 * MIB)]
    quarter = MIB // 4
    one = whole_pages(Range(first * quarter, size * quarter), filled)
    two = whole_pages(Range((first + size) * quarter, size * quarter), filled)
    assert one.end == two.offset
    assert one.bytes > 0
    assert two.bytes > 0


def test_pages_on_the_only_node_are_moved_to_where_they_are() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, bytes(3 * MIB))
        rests: list[float] = []
        move([Part(fd, 0, PAGE, 3 * MIB - PAGE)], 0, 0, rest=rests.append)
        assert len(rests) == 2
        assert all(rest > 0 for rest in rests)
        assert os.pread(fd, 10, PAGE) == bytes(10)
    finally:
        os.close(fd)


def test_load_average_forgets_and_waits_until_it_knows_enough() -> None:
    average = LoadAverage()
    assert not average.known
    average.add([[5e6, 0.0]])
    assert average.loads == [[0.0, 0.0]], "what was counted before it began"
    average.add([[5e6 + 400.0, 400.0]])
    assert average.loads == [[400.0, 400.0]]
    assert not average.known
    average.add([[5e6 + 400.0, 2.0 * LEAST_TOKENS + 400.0]])
    assert average.loads == [[200.0, 200.0 + 2.0 * LEAST_TOKENS]]
    assert average.known
    average.add([[7.0, 7.0]])
    assert average.loads == [[200.0, 200.0 + 2.0 * LEAST_TOKENS]], "the session is another: nothing is known of it yet"
    average.add([[8.0, 7.0]])
    assert average.loads == [[101.0, 100.0 + LEAST_TOKENS]]
    average.add([[1.0, 1.0], [1.0, 1.0]])
    assert average.loads == [[0.0, 0.0], [0.0, 0.0]]
