"""What this machine can do at most, by the engine's own loops (colibri_probe_* of colibri.h). Any thread; the GIL is released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

from engine_c._engine import ffi, lib
from engine_c.library import fail
from engine_c.structs import FORMATS

PROBE_ALIGN = 512


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement of one thread (colibri_probe): CLOCK_MONOTONIC nanoseconds, and bytes, operations or tokens of work."""

    begin_ns: int
    end_ns: int
    work: int


def rate(probes: Sequence[Probe]) -> float:
    """Work a nanosecond (giga-units a second) of probes that ran side by side, from the first begin to the last end."""
    span = max(probe.end_ns for probe in probes) - min(probe.begin_ns for probe in probes)
    return sum(probe.work for probe in probes) / max(span, 1)


def probe_fill(memory: mmap, *, start: int, size: int) -> Probe:
    """Writes memory[start : start + size], both multiples of PROBE_ALIGN. Work: bytes. EngineError EINVAL."""
    out, err = ffi.new("colibri_probe *"), ffi.new("colibri_error *")
    _check_range(memory, start, size)
    if lib.colibri_probe_fill(ffi.from_buffer("char *", memory) + start, size, out, err):
        raise fail(err)
    return Probe(out.begin_ns, out.end_ns, out.work)


def probe_read(memory: mmap, *, start: int, size: int, passes: int = 1) -> Probe:
    """Reads memory[start : start + size] in order, `passes` times. Work: bytes. EngineError EINVAL."""
    out, err = ffi.new("colibri_probe *"), ffi.new("colibri_error *")
    _check_range(memory, start, size)
    if lib.colibri_probe_read(ffi.from_buffer("char *", memory) + start, size, passes, out, err):
        raise fail(err)
    return Probe(out.begin_ns, out.end_ns, out.work)


def probe_compute(fmt: str, *, seconds: float) -> Probe:
    """Multiplies and adds in registers as a matrix of this weight format does. Work: operations."""
    out, err = ffi.new("colibri_probe *"), ffi.new("colibri_error *")
    if lib.colibri_probe_compute(FORMATS[fmt], int(seconds * 1e9), out, err):
        raise fail(err)
    return Probe(out.begin_ns, out.end_ns, out.work)


def probe_route(*, experts: int, top_k: int, tokens: int, hidden: int = 0, calls: int = 1000) -> Probe:
    """Routes made-up tokens; hidden 0: gate logits are given, else computed too. Work: tokens. EngineError EINVAL, ENOMEM."""
    out, err = ffi.new("colibri_probe *"), ffi.new("colibri_error *")
    if lib.colibri_probe_route(ffi.new("colibri_route_probe *", (experts, top_k, tokens, hidden, calls)), out, err):
        raise fail(err)
    return Probe(out.begin_ns, out.end_ns, out.work)


def _check_range(memory: mmap, start: int, size: int) -> None:
    if start < 0 or size < 0 or start + size > len(memory):
        raise ValueError(f"{start}..{start + size} lies outside of {len(memory)} bytes")
