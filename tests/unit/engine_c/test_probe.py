"""The wrapper of the probes: work and times come through, and memory outside the buffer is never touched."""

from __future__ import annotations

import mmap

import pytest

from engine_c import FORMATS, EngineError
from engine_c.probe import PROBE_ALIGN, Probe, probe_compute, probe_fill, probe_read, probe_route, rate


def test_memory_probes_tell_the_bytes_they_moved() -> None:
    with mmap.mmap(-1, 1 << 20) as memory:
        filled = probe_fill(memory, start=PROBE_ALIGN, size=1 << 16)
        assert filled.work == 1 << 16
        assert memory[PROBE_ALIGN - 1] == 0
        assert memory[PROBE_ALIGN] != 0
        assert probe_read(memory, start=0, size=1 << 20, passes=2).work == 2 << 20


def test_a_range_outside_the_buffer_is_refused() -> None:
    with mmap.mmap(-1, 1 << 12) as memory:
        with pytest.raises(ValueError, match="outside"):
            probe_read(memory, start=0, size=1 << 13)
        with pytest.raises(EngineError, match="multiples"):
            probe_read(memory, start=8, size=PROBE_ALIGN)


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_a_peak_takes_its_time(fmt: str) -> None:
    probe = probe_compute(fmt, seconds=0.002)
    assert probe.work > 0
    assert probe.end_ns - probe.begin_ns >= 2_000_000


def test_routing_counts_tokens_and_refuses_more_experts_than_there_are() -> None:
    assert probe_route(experts=8, top_k=2, tokens=16, calls=5).work == 80
    with pytest.raises(EngineError, match="router"):
        probe_route(experts=2, top_k=3, tokens=1)


def test_the_rate_of_probes_side_by_side_spans_all_of_them() -> None:
    assert rate([Probe(100, 200, 300), Probe(150, 300, 300)]) == 3.0
