"""Recordings: what is written is read back; what is damaged is refused, naming the line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from service.load import COUNTS, Load, between
from service.recording import Header, Recording, RecordingError, Window, header_line, read_recording, window_line
from tests.unit.service.loads import Counters

HEADER = Header(
    model="mix",
    layers=2,
    experts=3,
    top_k=1,
    expert_bytes=1000,
    interval_seconds=1.0,
    started="2026-01-31T12:00:00Z",
    places=(((0,), (0, 1), (1,)), ((), (), ())),
)
COUNT = st.integers(0, (1 << 62) - 1)
OURS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def loads(draw: st.DrawFn) -> Load:
    shapes = {name: getattr(Counters.zero(HEADER.layers, HEADER.experts), name).shape for name in COUNTS}
    counts = {
        name: np.array(draw(st.lists(COUNT, min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))), np.uint64).reshape(shape)
        for name, shape in shapes.items()
    }
    return Load(seconds=draw(st.integers(0, 10_000)) / 1000, **counts)


def one_step() -> Load:
    return between(Counters.zero(2, 3).step([[2, 0, 1], [1, 1, 1]], top_k=1, rerouted=1), None, seconds=1.0)


def idle() -> Load:
    return between(Counters.zero(2, 3), None, seconds=1.0)


def write(path: Path, *windows: Window, header: Header = HEADER, end: bytes = b"") -> Path:
    path.write_bytes(header_line(header) + b"".join(map(window_line, windows)) + end)
    return path


def assert_same(read: Load, written: Load) -> None:
    assert read.seconds == written.seconds
    for name in COUNTS:
        got, meant = getattr(read, name), getattr(written, name)
        assert (got.dtype, got.shape) == (meant.dtype, meant.shape)
        if not written.idle:
            np.testing.assert_array_equal(got, meant, err_msg=name)


@given(st.lists(loads(), max_size=4))
@OURS
def test_what_is_written_is_read_back(tmp_path: Path, written: list[Load]) -> None:
    windows = [Window(float(at), load) for at, load in enumerate(written)]
    recording = read_recording(write(tmp_path / "r", *windows))
    assert (recording.header, recording.torn) == (HEADER, "")
    assert [window.at for window in recording.windows] == [float(at) for at in range(len(written))]
    for window, load in zip(recording.windows, written, strict=True):
        assert_same(window.load, load)


def test_a_window_in_which_nothing_was_routed_is_short(tmp_path: Path) -> None:
    window = Window(1.0, idle())
    assert json.loads(window_line(window)) == {"at": 1.0, "seconds": 1.0}
    (read,) = read_recording(write(tmp_path / "r", window)).windows
    assert_same(read.load, window.load)


def test_totals_that_no_counter_holds_are_refused() -> None:
    most = Load(**{name: np.full_like(getattr(one_step(), name), 1 << 62) for name in COUNTS}, seconds=1.0)
    assert Recording(HEADER, (Window(1.0, most),)).total().tokens.max() == 1 << 62
    with pytest.raises(RecordingError, match="windows add up to tokens of more than"):
        Recording(HEADER, (Window(1.0, most), Window(2.0, most))).total()


def test_totals_are_of_all_windows_or_of_the_last(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path / "r", *(Window(float(at), one_step()) for at in (1, 2, 3, 4))))
    assert recording.total().tokens.tolist() == [[8, 0, 4], [4, 4, 4]]
    assert recording.total(last=1.5).tokens.tolist() == [[4, 0, 2], [2, 2, 2]]
    assert recording.total().seconds == 4.0
    with pytest.raises(RecordingError, match="no window"):
        Recording(HEADER, ()).total()


@given(st.integers(1, 10_000))
@OURS
def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path, cut: int) -> None:
    last = window_line(Window(2.0, one_step()))
    torn = last[: 1 + cut % (len(last) - 1)]
    recording = read_recording(write(tmp_path / "r", Window(1.0, one_step()), end=torn))
    assert len(recording.windows) == 1
    assert re.search(r"line 3 has no end", recording.torn)


@given(st.binary(min_size=1, max_size=200).filter(lambda data: b"\n" not in data))
@OURS
def test_garbage_in_the_middle_is_refused_naming_its_line(tmp_path: Path, garbage: bytes) -> None:
    path = write(tmp_path / "r", Window(1.0, one_step()), end=garbage + b"\n" + window_line(Window(2.0, one_step())))
    with pytest.raises(RecordingError, match="line 3: "):
        read_recording(path)


@given(st.binary(max_size=400))
@OURS
def test_no_file_at_all_gets_anything_but_a_clear_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=r"r: line 1"):
        read_recording(path)


def changed(window: dict[str, object] | None = None, **header: object) -> bytes:
    """A recording of one window, with fields put over (None: taken away)."""
    lines = [json.loads(header_line(HEADER)), json.loads(window_line(Window(1.0, one_step())))]
    for fields, over in zip(lines, (header, window or {}), strict=True):
        fields |= over
    return b"".join(json.dumps({key: value for key, value in fields.items() if value is not None}).encode() + b"\n" for fields in lines)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (changed(colibri_recording=2), "line 1: it is of version 2"),
        (changed(colibri_recording=None), "line 1: it is no header"),
        (changed(layers=0), "line 1: layers is 0"),
        (changed(layers=True), "line 1: layers is True"),
        (changed(layers=3), "line 1: places is no list of 3 but of 2"),
        (changed(top_k=4), "line 1: top_k is 4; it must be a whole number between 1 and 3"),
        (changed(model=None), "line 1: model is missing"),
        (changed(model=7), "line 1: model is 7"),
        (changed(places=[[[0], [0], [-1]], [[0], [0], [0]]]), "line 1: places has -1"),
        (changed(places=[[[0], [0], [1, 1]], [[0], [0], [0]]]), "line 1: places has [1, 1]"),
        (changed(places=[[[0], [0], [1 << 40]], [[0], [0], [0]]]), "line 1: places has 1099511627776; nodes have numbers"),
        (changed(expert_bytes=1 << 62), "line 1: expert_bytes is 4611686018427387904"),
        (changed(places=[[[0], [0], 1], [[0], [0], [0]]]), "line 1: places has 1"),
        (changed(more=1), "line 1: 'more' means nothing"),
        (changed({"at": -1.0}), "line 2: at is -1.0"),
        (changed({"at": "now"}), "line 2: at is 'now'"),
        (changed({"seconds": 1e300}), "line 2: seconds is 1e"),
        (changed({"at": 10**400}), "line 2: at is 1000"),
        (changed({"tokens": None}), "line 2: tokens is missing"),
        (changed({"tokens": [[1, 2, 3]]}), "line 2: tokens is no list of 2 but of 1"),
        (changed({"tokens": [[1, 2, 3], [1, 2]]}), "line 2: tokens is no list of 3 but of 2"),
        (changed({"tokens": [[1, 2, 3], [1, 2, 0.5]]}), "line 2: tokens has 0.5, which is no count"),
        (changed({"steps": [1, -1]}), "line 2: steps has -1"),
        (changed({"steps": [1, 1 << 63]}), "line 2: steps has 9223372036854775808"),
        (changed({"steps": 3}), "line 2: steps is no list of 2"),
        (changed({"runs": [[0] * 7] * 2}), "line 2: runs is no list of 8 but of 7"),
        (changed({"extra": 1}), "line 2: 'extra' means nothing"),
    ],
)
def test_each_damage_is_named(tmp_path: Path, data: bytes, sentence: str) -> None:
    path = tmp_path / "r"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=re.escape(sentence)):
        read_recording(path)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1" * 5000, b"[" * 100_000])
def test_what_json_does_not_have_is_refused(tmp_path: Path, number: bytes) -> None:
    path = write(tmp_path / "r", end=b'{"at": ' + number + b"}\n")
    with pytest.raises(RecordingError, match="line 2: it is no JSON"):
        read_recording(path)


def test_time_does_not_run_backwards(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"line 3: at is 1\.0, before the line above"):
        read_recording(write(tmp_path / "r", Window(2.0, idle()), Window(1.0, idle())))
