"""Model and Session on small models, one process, one thread."""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import engine_c
from engine_c import OPERATIONS, EngineError, Model, Part, Sampling, SeqWork, Session, SessionOptions, Worker
from ops.container import Container
from ops.random_model import SHAPES, make_model

OPTIONS = SessionOptions(max_rows=64, max_seqs=8, max_logit_rows=16, kv_blocks=16, trace_routes=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("engine") / "tiny.colibri"
    make_model(made, SHAPES["tiny"], quant="f32")
    return made


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model.open(path) as opened:
        yield opened


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    with Session(model, OPTIONS) as opened:
        yield opened


def test_the_info_is_the_containers(model: Model, path: Path) -> None:
    shape, info = SHAPES["tiny"], model.info
    assert (info.layers, info.hidden, info.experts, info.top_k, info.vocab) == (
        shape.layers, shape.hidden, shape.experts, shape.top_k, shape.vocab,
    )
    assert info.file_bytes == path.stat().st_size
    assert info.norm_eps == pytest.approx(1e-5)


def test_a_model_opens_through_a_descriptor_that_stays_the_callers(path: Path, model: Model) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with Model.from_fd(fd) as other:
            assert other.info == model.info
        assert os.fstat(fd).st_size == model.info.file_bytes
    finally:
        os.close(fd)


def halves(path: Path, fd: int, other: int) -> list[Part]:
    """The container as two parts on nodes 1 and 4, the second in `other`, which need hold nothing else."""
    size = path.stat().st_size
    cut = size // 2 // 4096 * 4096
    os.pwrite(other, os.pread(fd, size - cut, cut), cut)
    return [Part(fd=fd, node=1, offset=0, bytes=cut), Part(fd=other, node=4, offset=cut, bytes=size - cut)]


def test_a_model_of_parts_computes_the_same_and_counts_local_tasks(path: Path, model: Model) -> None:
    fd, other = os.open(path, os.O_RDONLY), os.memfd_create("other")
    work = [SeqWork([1, 2, 3], 0, [0], 1), SeqWork([9, 8], 0, [1], 2)]
    try:
        with Model.open_parts(halves(path, fd, other)) as parts:
            assert parts.info == model.info
            for split in (0, 1):
                options = SessionOptions(max_rows=64, max_seqs=8, max_logit_rows=16, kv_blocks=16, split_down=split)
                with Session(model, options) as plain, Session(parts, options) as placed:
                    expected, stats = plain.step(work)
                    assert (stats.tasks_homed, stats.tasks_local) == (0, 0)
                    local = []
                    for node in (1, 4, -1):
                        placed.lane_place(0, node)
                        results, stats = placed.step(work)
                        assert results == expected
                        local.append(stats.tasks_local)
                    assert local[:2] != [0, 0]
                    assert sum(local) == stats.tasks_homed
                    assert placed.lane_homed(0) == 3 * stats.tasks_homed
                    assert placed.lane_local(0) == sum(local)
                    assert placed.logits().tobytes() == plain.logits().tobytes()
    finally:
        os.close(fd)
        os.close(other)


def test_parts_that_do_not_fit_together_are_refused(path: Path) -> None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        fd = file.fileno()
        for parts, code, words in (
            ([], "EINVAL", "at least one part"),
            ([Part(fd, 0, 0, 4096), Part(fd, 1, 8192, size - 8192)], "EINVAL", "bytes 4096 to there are in no part"),
            ([Part(fd, 0, 0, size + 4096)], "EFORMAT", "truncated"),
        ):
            with pytest.raises(EngineError, match=words) as refusal:
                Model.open_parts(parts)
            assert refusal.value.name == code


def test_kv_heads_have_ranges_of_their_own(session: Session) -> None:
    ranges = [session.kv_range(head) for head in range(session.model.info.kv_heads)]
    assert all(offset % 4096 == 0 and size % 4096 == 0 for offset, size in ranges)
    assert all(offset + size <= after for (offset, size), (after, _) in pairwise(ranges))
    assert ranges[-1][0] + ranges[-1][1] <= os.fstat(session.arena_fd).st_size
    with pytest.raises(EngineError, match="KV head 2 is not one of the model's 2"):
        session.kv_range(2)


def test_the_time_of_a_step_is_told_by_operation(session: Session) -> None:
    _, stats = session.step([SeqWork([1, 2, 3], 0, [0], 1)])
    times = dict(zip(OPERATIONS, stats.op_ns, strict=True))
    assert {name for name, ns in times.items() if not ns} == {"store_kv", "combine"}
    assert sum(times.values()) <= stats.step_ns


@pytest.mark.parametrize(("name", "code"), [("missing.colibri", "EIO"), ("garbage.colibri", "EFORMAT")])
def test_what_is_no_container_is_an_error_with_a_sentence(name: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "garbage.colibri").write_bytes(b"x" * 10_000)
    with pytest.raises(EngineError) as refusal:
        Model.open(tmp_path / name)
    assert refusal.value.name == code
    assert len(str(refusal.value)) > 10


def test_a_model_in_use_is_not_closed(path: Path) -> None:
    model = Model.open(path)
    session = Session(model, OPTIONS)
    with pytest.raises(EngineError, match="1 open sessions or workers") as refusal:
        model.close()
    assert refusal.value.name == "ESTATE"
    session.close()
    session.close()
    model.close()
    model.close()
    with pytest.raises(EngineError, match="the model is closed"):
        Session(model, OPTIONS)


def test_a_closed_session_refuses(model: Model) -> None:
    session = Session(model, OPTIONS)
    session.close()
    for call in (lambda: session.step([]), lambda: session.lane_state(0), session.logits):
        with pytest.raises(EngineError, match="the session is closed"):
            call()


@pytest.mark.parametrize("options", [SessionOptions(), SessionOptions(max_rows=0, kv_blocks=1), SessionOptions(kv_blocks=1, max_lanes=256)])
def test_options_out_of_range_are_refused(options: SessionOptions, model: Model) -> None:
    for make in (lambda: Session(model, options), lambda: engine_c.session_bytes(model, options)):
        with pytest.raises(EngineError) as refusal:
            make()
        assert refusal.value.name == "EINVAL"


def test_results_agree_with_the_logits(session: Session) -> None:
    work = [
        SeqWork([1, 2, 3], 0, [0], 3, Sampling(top_logprobs=5), targets=[2, 3, -1]),
        SeqWork([9, 8], 0, [1], 0),
        SeqWork([4], 0, [2], 1),
    ]
    results, stats = session.step(work)
    logits = session.logits().astype(np.float64)
    assert logits.shape == (4, session.model.info.vocab)
    logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1, keepdims=True)
    rows = [row for result in results for row in result.rows]
    assert [len(result.rows) for result in results] == [3, 0, 1]
    for i, row in enumerate(rows):
        assert row.token == logits[i].argmax()
        assert row.logprob == pytest.approx(logprobs[i, row.token], abs=1e-4)
    for i, target in enumerate([2, 3]):
        assert rows[i].target_logprob == pytest.approx(logprobs[i, target], abs=1e-4)
        assert rows[i].target_rank == (logits[i] > logits[i, target]).sum()
    assert (rows[2].target_rank, rows[3].target_rank) == (-1, -1)
    assert [token for token, _ in rows[0].top] == np.argsort(-logits[0])[:5].tolist()
    assert rows[3].top == ()
    assert stats.lanes == 1
    assert stats.step_ns > 0


def test_routes_are_those_of_all_rows_and_counts_add_up(session: Session) -> None:
    session.step([SeqWork([1, 2, 3], 0, [0], 1), SeqWork([9, 8], 0, [1], 0)])
    experts, weights = session.routes(5)
    info = session.model.info
    assert experts.shape == weights.shape == (info.router_layers, 5, info.top_k)
    assert weights.sum(-1) == pytest.approx(np.ones((info.router_layers, 5)), abs=1e-5)
    counts = session.expert_counts()
    assert counts.sum(1).tolist() == [5 * info.top_k] * info.layers
    assert counts[0].tolist() == np.bincount(experts[0].ravel(), minlength=info.experts).tolist()


def test_a_step_that_is_refused_says_why_and_the_next_one_works(session: Session) -> None:
    good = [SeqWork([1, 2, 3], 0, [0], 1)]
    expected, _ = session.step(good)
    for bad in (
        [SeqWork([10**6], 0, [0], 1)],
        [SeqWork([1], 0, [99], 1)],
        [SeqWork([1] * 65, 0, [0, 1, 2, 3, 4], 1)],
        [SeqWork([1], 16, [0], 1)],
        [SeqWork([1], 0, [i], 1) for i in range(9)],
        [SeqWork([], 0, [0], 0)],
    ):
        with pytest.raises(EngineError) as refusal:
            session.step(bad)
        assert refusal.value.name == "EINVAL"
        assert len(str(refusal.value)) > 10
        assert session.logits().shape[0] == 0
        assert session.step(good)[0] == expected


def test_a_nan_spoils_its_own_sequence_only_and_is_named(path: Path, tmp_path: Path) -> None:
    """Token 7's embedding holds a NaN."""
    spoilt = tmp_path / "spoilt.colibri"
    shutil.copy(path, spoilt)
    with Container.open(path) as container:
        offset = container.entry("embed").offset
    with open(spoilt, "r+b") as file:
        file.seek(offset + 7 * 4)  # panel 0, column 0, half 0, lane 7
        file.write(struct.pack("<f", math.nan))
    with Model.open(path) as clean, Session(clean, OPTIONS) as session:
        expected, _ = session.step([SeqWork([1, 2, 3], 0, [0], 1)])
    with Model.open(spoilt) as model, Session(model, OPTIONS) as session:
        good, bad, prefill = session.step([SeqWork([1, 2, 3], 0, [0], 1), SeqWork([1, 7], 0, [1], 2), SeqWork([7, 1], 0, [2], 0)])[0]
    assert [good] == expected
    assert bad.error == "a NaN or infinity arose in layer 0 at position 1"
    assert (bad.ok, prefill.ok) == (False, False)
    assert "positions 0 to 1" in prefill.error


def test_lanes_are_bound_once_and_within_range(model: Model) -> None:
    with Session(model, SessionOptions(kv_blocks=1, max_lanes=2)) as session:
        session.lane_bind(0, pid=os.getpid(), pidfd=-1)
        assert (session.lane_state(0), session.lane_tasks(0)) == (engine_c.LANE_EMPTY, 0)
        for call in (
            lambda: session.lane_bind(2, pid=1, pidfd=-1),
            lambda: session.lane_state(2),
            lambda: session.lane_leave(-1),
            lambda: session.lane_dead(255),
            lambda: session.lane_place(3, 0),
            lambda: session.lane_place(0, 1024),
        ):
            with pytest.raises(EngineError) as refusal:
                call()
            assert refusal.value.name == "EINVAL"


def test_a_worker_refuses_segments_that_are_none(model: Model, path: Path) -> None:
    with open(path, "rb") as wrong, pytest.raises(EngineError):
        Worker(model, wrong.fileno(), wrong.fileno())
    assert model.users == 0


def test_instruction_sets_are_listed_and_unknown_ones_refused() -> None:
    assert "generic" in engine_c.isa_available()
    with pytest.raises(EngineError, match="8086") as refusal:
        engine_c.isa_select("8086")
    assert refusal.value.name == "EUNSUPPORTED"
    engine_c.isa_select(None)
    assert engine_c.isa_name() in engine_c.isa_available()
    assert engine_c.version().count(".") == 2


def test_who_waits_for_a_step_is_told_once_however_it_ends(session: Session) -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        session.step([SeqWork([1, 2, 3], 0, [0], 1)], tell=bell)
        assert os.eventfd_read(bell) == 1
        session.step([SeqWork([4], 3, [0], 1)])
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bell)
        with pytest.raises(EngineError, match="outside the vocabulary"):
            session.step([SeqWork([1 << 20], 4, [0], 1)], tell=bell)
        assert os.eventfd_read(bell) == 1
    finally:
        os.close(bell)
