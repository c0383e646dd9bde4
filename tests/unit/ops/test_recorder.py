"""A recording in the making: what is on disk stays within bounds and can be read at any time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.recorder import Recorder
from service.load import Load, between
from service.recording import Header, Window, header_line, read_recording, window_line
from tests.unit.service.loads import Counters

HEADER = Header(model="m", layers=2, experts=3, top_k=1, expert_bytes=9, interval_seconds=1.0, started="2026-01-31T12:00:00Z")


def load() -> Load:
    return between(Counters.zero(2, 3).step([[2, 0, 1], [1, 1, 1]], top_k=1), None, seconds=1.0)


def test_what_is_written_can_be_read_at_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "out", HEADER, 1 << 20)
    for at in range(1, 4):
        recorder.write(Window(float(at), load()))
        assert [window.at for window in read_recording(tmp_path / "out").windows] == list(range(1, at + 1))
    recorder.close()
    assert not recorder.former.exists()
    assert recorder.windows == 3


@pytest.mark.parametrize("most", [0, 1500, 4000, 20_000])
def test_what_is_kept_stays_within_bounds_and_is_the_latest(tmp_path: Path, most: int) -> None:
    path = tmp_path / "out"
    longest = len(header_line(HEADER)) + len(window_line(Window(1000.0, load())))
    recorder = Recorder(path, HEADER, most)
    for at in range(1, 101):
        recorder.write(Window(float(at), load()))
        kept = [file.stat().st_size for file in (path, recorder.former) if file.exists()]
        assert sum(kept) <= max(most, 2 * longest)
    recorder.close()
    times = [window.at for file in (recorder.former, path) for window in read_recording(file).windows]
    assert times == list(range(101 - len(times), 101))
    assert len(times) >= most // (2 * longest)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "out.1"]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(FileExistsError):
        Recorder(tmp_path / "out", HEADER, 1 << 20)
    assert (tmp_path / "out").read_text() == "precious"
