"""Shares that change: what is held is in memory, what is not takes none, and everybody reads the model's bytes throughout."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from engine_c import Model, Session, SessionOptions
from workers.growing import Share, ShareError, ShareTooLarge, UnknownExpert, _minus, _union, open_growing
from workers.keeping import Keep, kept_ranges
from workers.layout import Layout, read_layout
from workers.placement import PAGE, Extent
from workers.plan import NodeWish, plan_team
from workers.segments import ModelImage
from workers.supervisor import Supervisor
from workers.topology import Node, Topology, read_topology

PLENTY = 1 << 40
A, B = frozenset({(0, 1), (1, 0), (1, 1)}), frozenset({(0, 2), (1, 1), (2, 3)})


@dataclass
class Held:
    share: Share
    image: ModelImage
    model: Model
    supervisor: Supervisor
    layout: Layout
    path: Path

    def taken(self) -> int:
        """Bytes of memory that the copies take."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self.image.writable.values())

    def size(self, experts: frozenset[tuple[int, int]]) -> int:
        return sum(-(-(end - begin) // PAGE) * PAGE for begin, end in kept_ranges(self.layout, Keep(experts, backbone=False)))

    def read(self) -> bytes:
        return b"".join(os.pread(part.fd, part.bytes, part.offset) for part in self.image.parts_for(None))


@pytest.fixture(params=[1, 2])
def held(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Held]:
    """With workers, on this machine."""
    yield from _open(tiny_model, workers=request.param, available=PLENTY)


def _open(path: Path, *, workers: int, available: int, mode: str = "memfd") -> Iterator[Held]:
    topology = read_topology()
    plan = plan_team(topology, default=NodeWish(workers, 1), front_lane="on")
    options = SessionOptions(max_seqs=1, max_logit_rows=1, kv_blocks=1, split_down=1, max_lanes=plan.max_lanes, front_lane=1)
    with open_growing(path, placement="none", topology=topology, mode=mode) as image:  # type: ignore[arg-type]
        layout = read_layout(image.file)
        with Model.open_parts(image.parts_for(None)) as model, Session(model, options) as session:
            supervisor = Supervisor(session, image, plan)
            supervisor.start(30)
            try:
                team = model, supervisor, plan.front_node
                share = Share(image, team, topology, mode=mode, available=lambda: available)  # type: ignore[arg-type]
                yield Held(share, image, model, supervisor, layout, path)
            finally:
                supervisor.stop()


def test_what_is_held_takes_memory_and_what_is_given_up_none(held: Held) -> None:
    for experts in (A, B, A | B, B, frozenset[tuple[int, int]](), A):
        held.share.hold(experts)
        assert held.taken() == held.size(experts)
        assert held.read() == held.path.read_bytes()


def test_nobody_else_can_write_or_resize(held: Held) -> None:
    held.share.hold(A)
    copies = {part.fd for part in held.image.parts_for(None)} - {held.image.file}
    assert copies
    for fd in copies:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
    for fd in held.image.writable.values():
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)


def test_memory_is_not_given_back_while_a_worker_may_map_it(held: Held) -> None:
    held.share.hold(A)
    slots = list(held.supervisor._slots.values())
    slots[-1].missed = True  # as if it had not been able to map something
    held.share.hold(B)
    assert held.taken() == held.size(A | B)
    assert held.read() == held.path.read_bytes()
    held.share.hold(A)  # what comes back was there still
    assert held.taken() == held.size(A | B)
    slots[-1].missed = False
    held.share.hold(A)
    assert held.taken() == held.size(A)
    assert held.read() == held.path.read_bytes()


def test_a_share_that_can_not_be_held_changes_nothing(tiny_model: Path) -> None:
    for held in _open(tiny_model, workers=1, available=PLENTY):
        held.share.hold(A)
        with pytest.raises(UnknownExpert, match="no expert 99 of layer 0"):
            held.share.hold(A | {(0, 99)})
        held.share._available = lambda: 1 << 20
        with pytest.raises(ShareTooLarge, match="1 MiB are free: give the node more memory"):
            held.share.hold(A | B)
        assert held.taken() == held.size(A)
        assert held.read() == held.path.read_bytes()


def test_a_file_that_can_not_be_read_leaves_no_memory_taken(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.colibri"
    path.write_bytes(tiny_model.read_bytes())
    for held in _open(path, workers=0, available=PLENTY):
        held.share.hold(frozenset({(0, 0)}))
        os.truncate(path, held.layout.layers[2][0].gate_up.offset)
        with pytest.raises(ShareError, match="became shorter"):
            held.share.hold(frozenset({(0, 0), (1, 0), (2, 3)}))
        assert held.taken() == held.size(frozenset({(0, 0)}))


def test_with_little_memory_the_file_itself_is_held(tiny_model: Path) -> None:
    for held in _open(tiny_model, workers=1, available=1 << 20, mode="auto"):
        held.share.hold(A)
        assert held.taken() == 0
        assert held.read() == held.path.read_bytes()
        held.share._available = lambda: PLENTY
        held.share.hold(A | B)
        assert held.taken() == held.size(B - A)
        held.share.hold(frozenset())
        assert held.taken() == 0


def test_pieces_have_the_node_they_will_be_put_on_from_the_start(tiny_model: Path) -> None:
    two = Topology((Node(0, (0,), PLENTY), Node(1, (1,), PLENTY)), (0, 1), 2 * PLENTY)
    with open_growing(tiny_model, placement="experts", topology=two, mode="memfd") as image:
        assert {part.node for part in image.parts_for(0)} == {0, 1}
        assert {part.fd for part in image.parts_for(0)} == {image.file}


_EXTENTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 5)), max_size=8)


@given(_EXTENTS, _EXTENTS)
def test_pieces_are_added_and_taken_away_like_sets_of_pages(some: list[tuple[int, int, int]], others: list[tuple[int, int, int]]) -> None:
    a, b = (_union((), [Extent(node, at * PAGE, count * PAGE) for node, at, count in pieces]) for pieces in (some, others))
    assert _pages(_minus(a, b)) == _pages(a) - _pages(b)
    assert _pages(_union(a, b)) == _pages(a) | _pages(b)


def _pages(extents: tuple[Extent, ...]) -> set[tuple[int, int]]:
    pages = [(e.node, at) for e in extents for at in range(e.offset, e.offset + e.bytes, PAGE)]
    assert len(pages) == len(set(pages))
    return set(pages)
