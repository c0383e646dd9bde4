"""Reads, packs and writes the tensors of a plan: two threads read and pack ahead, the caller's thread writes in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_c import EngineError
from engine_c.packing import pack, pack_expert
from ops.container_layout import stored_bytes
from ops.container_writer import ContainerWriter
from ops.convert.errors import ConvertError
from ops.convert.plan import Job, Rows

Bytes: TypeAlias = NDArray[np.uint8]
Progress: TypeAlias = Callable[[int, int, str], None]
"""Bytes written, bytes in all, the tensor just written."""

THREADS = 2
_CHUNK_BYTES = 64 << 20  # f32 bytes of a matrix packed at a time; whole panels are packed alike wherever they are cut
_SERIAL_BYTES = 512 << 20  # pieces with more f32 bytes are packed one at a time, to bound the memory
_PANEL = 32


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a tensor that is read and packed in one go. `load_bytes`: f32 bytes in memory meanwhile."""

    make: Callable[[], Bytes]
    load_bytes: int


def write_tensors(writer: ContainerWriter, jobs: Sequence[Job], progress: Progress | None) -> None:
    """Writes every job's tensor, in order."""
    total = sum(stored_bytes(job.entry.layout, job.entry.format, job.entry.shape) for job in jobs)
    pieces = [_pieces(job) for job in jobs]
    largest = max(piece.load_bytes for group in pieces for piece in group)
    threads = 1 if largest > _SERIAL_BYTES else THREADS
    done = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="convert")
    try:
        made = _in_order(pool, (piece.make for group in pieces for piece in group), ahead=threads)
        for job, group in zip(jobs, pieces, strict=True):
            writer.add_segments(job.entry, islice(made, len(group)))
            done += stored_bytes(job.entry.layout, job.entry.format, job.entry.shape)
            if progress is not None:
                progress(done, total, job.entry.name)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ThreadPoolExecutor, tasks: Iterable[Callable[[], Bytes]], *, ahead: int) -> Iterator[Bytes]:
    """Results in the order of the tasks, at most `ahead` tasks running or finished beyond the one asked for."""
    waiting: deque[Future[Bytes]] = deque()
    for task in tasks:
        waiting.append(pool.submit(task))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _pieces(job: Job) -> list[_Piece]:
    entry = job.entry
    if job.expert is not None:
        return [_Piece(lambda: _packed_expert(job), 4 * 3 * entry.shape[0] * entry.shape[1])]
    if job.rows is None:
        raise ConvertError(f"tensor {entry.name}: nothing says where its values come from")
    count, columns = entry.shape[0], entry.shape[1] if len(entry.shape) > 1 else 1
    step = max(_CHUNK_BYTES // (4 * columns) // _PANEL, 1) * _PANEL
    return [_piece(job, job.rows, start, min(start + step, count), columns) for start in range(0, count, step)]


def _piece(job: Job, rows: Rows, start: int, stop: int, columns: int) -> _Piece:
    make = _plain if job.entry.layout == "plain" else _packed
    return _Piece(lambda: make(job, rows, start, stop), 4 * (stop - start) * columns)


def _plain(job: Job, rows: Rows, start: int, stop: int) -> Bytes:
    values = np.ascontiguousarray(rows(start, stop), dtype=np.float32)
    if not np.isfinite(values).all():
        raise ConvertError(f"{_origin(job)}, rows {start}..{stop - 1}, holds NaN or infinity; the checkpoint is damaged")
    return values.reshape(-1).view(np.uint8)


def _packed(job: Job, rows: Rows, start: int, stop: int) -> Bytes:
    try:
        return pack(job.entry.format, rows(start, stop))
    except EngineError as error:
        raise ConvertError(f"{_origin(job)}, rows {start}..{stop - 1}, cannot be packed as {job.entry.format}: {error}") from error


def _packed_expert(job: Job) -> Bytes:
    assert job.expert is not None  # _pieces looked
    gate, up, down = job.expert()
    try:
        return pack_expert(job.entry.format, gate, up, down)
    except EngineError as error:
        raise ConvertError(f"{_origin(job)}, cannot be packed as {job.entry.format}: {error}") from error


def _origin(job: Job) -> str:
    return job.origin or f"tensor {job.entry.name}"
