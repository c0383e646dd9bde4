"""The machine's limits, measured where the engine computes: plain reading speed and arithmetic peaks on the lanes' cores."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from engine_c import isa_available, isa_name, isa_select
from engine_c.probe import Probe, probe_compute, probe_fill, probe_read, rate
from ops.bench.limits import MachineLimits
from ops.bench.measure import Row
from workers.plan import NodeWish, plan_team
from workers.topology import read_topology

_HUGE = 2 << 20
_BYTES = 512 << 20
_FEWEST = 4  # times the last-level cache
PEAKS = ("int8", "bf16", "f32")
_PEAK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Cores:
    """CPUs of the lanes a team would have; None for a lane that is pinned to none."""

    cpus: tuple[int | None, ...]


def lane_cores(*, workers_per_node: int | None = None, threads_per_worker: int | None = None) -> Cores:
    """Where a team with these wishes computes."""
    plan = plan_team(read_topology(), default=NodeWish(workers_per_node, threads_per_worker))
    front = [plan.front_cpu] if plan.front_lane else []
    workers = [cpu for worker in plan.workers for cpu in worker.cpus or (None,) * len(worker.lanes)]
    return Cores((*front, *workers))


class Meter:
    """A buffer beyond every cache, on huge pages, touched by the cores that read it; measures as often as asked. Close it after."""

    def __init__(self, cores: Cores, *, size: int | None = None) -> None:
        self.cores = cores
        lanes = len(cores.cpus)
        wish = size or max(_BYTES, _FEWEST * last_level_cache())
        self._part = max(_HUGE, wish // lanes // _HUGE * _HUGE)
        # Private: shared anonymous memory would be shmem, which gets no huge pages by madvise.
        self._memory = mmap.mmap(-1, self._part * lanes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.write_gb_s = rate(self._each(lambda lane: probe_fill(self._memory, start=lane * self._part, size=self._part)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives the memory back."""
        self._memory.close()

    def read(self, *, repeats: int = 3) -> list[float]:
        """GB/s of all cores together, each reading its own part."""
        return [rate(self._each(lambda lane: probe_read(self._memory, start=lane * self._part, size=self._part))) for _ in range(repeats)]

    def read_one(self, *, repeats: int = 3) -> list[float]:
        """GB/s of the first core alone, the others idle."""
        first = self.cores.cpus[:1]
        return [rate(side_by_side(first, lambda _: probe_read(self._memory, start=0, size=self._part))) for _ in range(repeats)]

    def peak(self, fmt: str, *, cpus: Sequence[int | None] | None = None, repeats: int = 3) -> list[float]:
        """GOP/s of all cores together (or of `cpus`) with the instructions of a weight format."""
        where = self.cores.cpus if cpus is None else cpus
        return [rate(side_by_side(where, lambda _: probe_compute(fmt, seconds=_PEAK_SECONDS))) for _ in range(repeats)]

    def limits(self) -> MachineLimits:
        """Everything at once, the best of a few each: a limit is what can be reached."""
        peaks = {fmt: max(self.peak(fmt)) for fmt in PEAKS}
        return MachineLimits(lanes=len(self.cores.cpus), read_gb_s=max(self.read()), read_one_gb_s=max(self.read_one()), peak_gops=peaks)

    def _each(self, run: Callable[[int], Probe]) -> list[Probe]:
        return side_by_side(self.cores.cpus, run)


def side_by_side(cpus: Sequence[int | None], run: Callable[[int], Probe]) -> list[Probe]:
    """run(i) on a thread pinned to cpus[i], all started together. Whatever one raises is raised here."""
    probes: list[Probe | BaseException] = [RuntimeError("not run")] * len(cpus)
    start = threading.Barrier(len(cpus))

    def work(index: int, cpu: int | None) -> None:
        try:
            if cpu is not None:
                os.sched_setaffinity(0, {cpu})  # 0: this thread alone
            start.wait()
            probes[index] = run(index)
        except BaseException as failure:
            probes[index] = failure
            start.abort()

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(cpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in probes:
        if isinstance(failure, BaseException) and not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    return [probe for probe in probes if isinstance(probe, Probe)]


def bench_bandwidth(meter: Meter, *, samples: int) -> list[Row]:
    """Reading on one core and on all, writing, and each instruction set's peaks on one core and on all."""
    lanes = len(meter.cores.cpus)
    rows = [
        Row("read, 1 core", "GB/s", tuple(meter.read_one(repeats=samples))),
        Row(f"read, {lanes} cores", "GB/s", tuple(meter.read(repeats=samples))),
        Row(f"first write, {lanes} cores", "GB/s", (meter.write_gb_s,)),
    ]
    chosen = isa_name()
    try:
        for isa in isa_available():
            isa_select(isa)
            for fmt in PEAKS:
                rows.append(Row(f"{isa} {fmt}, 1 core", "GOP/s", tuple(meter.peak(fmt, cpus=meter.cores.cpus[:1], repeats=samples))))
                rows.append(Row(f"{isa} {fmt}, {lanes} cores", "GOP/s", tuple(meter.peak(fmt, repeats=samples))))
    finally:
        isa_select(chosen)
    return rows


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the first CPU's largest cache; 0 if the system does not say."""
    sizes = [path.read_text(encoding="ascii").strip() for path in folder.glob("index*/size")]
    shifts = {"K": 10, "M": 20, "G": 30}
    return max((int(size[:-1]) << shifts[size[-1]] for size in sizes if size[-1:] in shifts), default=0)
