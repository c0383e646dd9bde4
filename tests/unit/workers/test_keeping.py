"""Shares of a model: what is copied, and that everything can still be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from engine_c import Model, Part
from workers.keeping import Keep, kept_ranges, left_out
from workers.layout import Layout, read_layout
from workers.parts import within
from workers.placement import PAGE
from workers.segments import ModelImage, SegmentError, open_image


def layout_of(path: Path) -> Layout:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_layout(fd)
    finally:
        os.close(fd)


def read(parts: tuple[Part, ...]) -> bytes:
    """What a process that maps the parts sees; they must follow one another without gap."""
    at, data = 0, b""
    for part in parts:
        assert part.offset == at
        data += os.pread(part.fd, part.bytes, part.offset)
        at += part.bytes
    return data


def copied(image: ModelImage) -> int:
    return sum(extent.bytes for extent in image.kept or ())


@pytest.mark.parametrize("backbone", [True, False])
def test_a_share_is_copied_and_the_rest_read_from_the_file(tiny_model: Path, backbone: bool) -> None:
    layout = layout_of(tiny_model)
    keep = Keep(frozenset({(0, 1), (2, 0)}), backbone=backbone)
    with open_image(tiny_model, mode="memfd", placement="none", keep=keep) as image:
        parts = image.parts_for(None)
        assert read(parts) == tiny_model.read_bytes()
        copies = tuple(part for part in parts if os.fstat(part.fd).st_ino != tiny_model.stat().st_ino)
        assert sum(part.bytes for part in copies) == copied(image)
        for layer, expert in keep.experts:
            block = layout.layers[layer][expert]
            assert any(part.offset <= block.gate_up.offset and block.down.end <= part.offset + part.bytes for part in copies)
        assert all(part.offset % PAGE == 0 for part in parts)
        assert not any(within(copies, x.gate_up.offset + PAGE, x.bytes - 2 * PAGE) for x in (layout.layers[0][2], layout.layers[2][3]))
        # Nothing but the share takes memory.
        assert sum(os.fstat(fd).st_blocks * 512 for fd in {part.fd for part in copies}) <= copied(image) + PAGE
        Model.open_parts(parts).close()


def test_nothing_but_the_backbone_is_copied_for_who_computes_no_experts(tiny_model: Path) -> None:
    layout = layout_of(tiny_model)
    experts = sum(expert.bytes for layer in layout.layers for expert in layer)
    with open_image(tiny_model, mode="memfd", placement="none", keep=Keep()) as image:
        assert copied(image) <= layout.size - experts + 2 * PAGE * len(layout.layers)
        for matrix in layout.backbone:
            assert any(kept.offset <= matrix.offset and matrix.end <= kept.offset + kept.bytes for kept in image.kept or ())
        assert read(image.parts_for(None)) == tiny_model.read_bytes()


@pytest.mark.parametrize("layers", [((1, 2),), ((0, 1), (2, 3)), ((0, 3),)])
def test_layers_are_kept_whole_or_left_out_whole(tiny_model: Path, layers: tuple[tuple[int, int], ...]) -> None:
    layout = layout_of(tiny_model)
    numbers = {number for first, end in layers for number in range(first, end)}
    within_layers = [extent for number in numbers for extent in layout.whole[number]]
    size = sum(end - begin for begin, end in within_layers)
    own = kept_ranges(layout, Keep(backbone=False, layers=layers))
    assert all(any(begin <= first and last <= end for begin, end in own) for first, last in within_layers)
    assert size <= sum(end - begin for begin, end in own) <= size + 2 * PAGE * len(within_layers)
    rest = kept_ranges(layout, Keep(but=layers))
    outside = left_out(kept_ranges(layout, Keep()), rest)
    assert outside  # less is kept than of a backbone with these layers
    others = [extent for number in {0, 1, 2} - numbers for extent in _backbone(layout, number)]
    assert not any(begin < last and first < end for begin, end in outside for first, last in others)
    with open_image(tiny_model, mode="memfd", placement="none", keep=Keep(backbone=False, layers=layers)) as image:
        assert read(image.parts_for(None)) == tiny_model.read_bytes()
        Model.open_parts(image.parts_for(None)).close()


def _backbone(layout: Layout, layer: int) -> list[tuple[int, int]]:
    """A layer's tensors but the experts."""
    experts = {expert.gate_up.offset for expert in layout.layers[layer]}
    return [(begin, end) for begin, end in layout.whole[layer] if begin not in experts]


def test_layers_that_are_not_there_are_refused(tiny_model: Path) -> None:
    with pytest.raises(SegmentError, match="there is no layer 3 in it: it has 3"):
        open_image(tiny_model, mode="memfd", keep=Keep(backbone=False, layers=((2, 4),)))


def test_a_share_of_nothing_is_the_file(tiny_model: Path) -> None:
    with open_image(tiny_model, mode="memfd", keep=Keep(backbone=False)) as image:
        assert image.mode == "map"
        assert read(image.parts_for(None)) == tiny_model.read_bytes()


def test_all_shares_together_are_the_model(tiny_model: Path) -> None:
    layout = layout_of(tiny_model)
    everything = frozenset((number, index) for number, layer in enumerate(layout.layers) for index in range(len(layer)))
    assert kept_ranges(layout, Keep(everything)) == ((0, layout.size),)


def test_an_expert_that_is_not_there_is_refused_and_nothing_stays_open(tiny_model: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SegmentError, match="there is no expert 9999 of layer 0"):
        open_image(tiny_model, mode="memfd", keep=Keep(frozenset({(0, 9999)})))
    assert os.listdir("/proc/self/fd") == before


def ranges_of(members: set[int]) -> tuple[tuple[int, int], ...]:
    """Ascending, no two touching."""
    begins = [at for at in sorted(members) if at - 1 not in members]
    ends = [at + 1 for at in sorted(members) if at + 1 not in members]
    return tuple(zip(begins, ends, strict=True))


@given(st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15)))
def test_left_out_is_the_difference(some: set[int], others: set[int]) -> None:
    assert left_out(ranges_of(some), ranges_of(others)) == ranges_of(some - others)
