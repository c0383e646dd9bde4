"""C arrays of a step, kept between steps: filled by slice assignment, grown when a batch needs more, never shrunk.

Most steps continue the one before: the same sequences, a token each. Then only tokens, positions and what blocks were added are written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from engine_c._engine import ffi
from engine_c.routing import Damping
from engine_c.structs import RowResult, Sampling, SeqResult, SeqWork, SessionOptions, StepStats

if TYPE_CHECKING:
    from engine_c._engine import Array, Row

_SEQ_INTS = ffi.sizeof("colibri_seq") // 4
_START, _BLOCKS = ffi.offsetof("colibri_seq", "start") // 4, ffi.offsetof("colibri_seq", "n_blocks") // 4
_ROW_SIZE = ffi.sizeof("colibri_row_result")
_ROW = struct.Struct(f"=iiiiffi{_ROW_SIZE - 28}x")  # status, error_layer, token, n_top, logprob, target_logprob, target_rank


class BatchBuffers:
    """One colibri_batch and everything it points to."""

    def __init__(self, options: SessionOptions, layers: int) -> None:
        self._layers = layers
        self.batch = ffi.new("colibri_batch *")
        self.stats = ffi.new("colibri_step_stats *")
        self.n_rows = 0
        self._seqs = ffi.new("colibri_seq[]", options.max_seqs)
        self.seq_status = ffi.new("int32_t[]", options.max_seqs)
        self.rows = ffi.new("colibri_row_result[]", options.max_logit_rows)
        self._tokens = ffi.new("int32_t[]", options.max_rows)
        self._targets = ffi.new("int32_t[]", options.max_logit_rows)
        self._blocks = ffi.new("int32_t[]", 4096)
        self._history = ffi.new("int32_t[]", 4096)
        self._dampings = ffi.new("colibri_damping[]", 4)
        self._rerouted = ffi.new("int32_t[]", options.max_seqs)
        # what must be the same of the batch in the arrays for the next to continue it, if all its sequences decode
        self._last: list[tuple[Sequence[int], Sampling, Damping | None, int]] = []
        self._last_blocks: list[int] = []  # how many blocks each has
        self._see()

    def _see(self) -> None:
        """Views of the arrays; made again when those are."""
        self._seq_ints = memoryview(ffi.buffer(self._seqs)).cast("B").cast("i")
        self._row_bytes = memoryview(ffi.buffer(self.rows)).cast("B")

    def fill(self, work: Sequence[SeqWork]) -> None:
        """Copies a batch into the C arrays. What does not fit a C integer raises OverflowError, a wrong type TypeError."""
        if not self._continue(work):
            self._last = []
            self._fill(work)
            if all(_decodes(w) for w in work):
                self._last = [(w.blocks, w.sampling, w.damping, w.slot) for w in work]
                self._last_blocks = [len(w.blocks) for w in work]

    def _continue(self, work: Sequence[SeqWork]) -> bool:
        """Writes what is new if this batch has the sequences of the last, one token of each; False if it has not: all must be written."""
        last = self._last
        if len(work) != len(last) or not last:
            return False
        tokens = []
        for w, (blocks, sampling, damping, slot) in zip(work, last):  # noqa: B905 -- as long, by the check above; strict costs more than the rest
            if w.blocks is not blocks or w.sampling is not sampling or w.damping is not damping or w.slot != slot or not _decodes(w):
                return False
            tokens.append(w.tokens[0])
        self._last = []
        self._tokens[0 : len(tokens)] = tokens
        ints, counts, grown = self._seq_ints, self._last_blocks, False
        try:
            for i, w in enumerate(work):
                ints[i * _SEQ_INTS + _START] = w.start
                if len(w.blocks) != counts[i]:
                    counts[i] = ints[i * _SEQ_INTS + _BLOCKS] = len(w.blocks)
                    grown = True
        except ValueError:  # no C integer holds it: filling all says so as it always does
            return False
        if grown:
            self._blocks = self.batch.blocks = _assign(self._blocks, [block for w in work for block in w.blocks])
        self._last = last
        self.n_rows = len(work)
        return True

    def _fill(self, work: Sequence[SeqWork]) -> None:
        tokens: list[int] = []
        blocks: list[int] = []
        history: list[int] = []
        targets: list[int] = []
        seqs: list[tuple[object, ...]] = []
        any_target = False
        dampings: dict[Damping, int] = {}
        for w in work:
            damping = -1 if w.damping is None else dampings.setdefault(w.damping, len(dampings))
            counts = len(w.tokens), w.start, w.n_logits, len(w.blocks), len(w.history)
            seqs.append((*counts, w.slot, damping, w.routes, w.sampling.as_tuple()))
            tokens += w.tokens
            blocks += w.blocks
            history += w.history
            if w.targets is None:
                targets += [-1] * w.n_logits
            elif len(w.targets) == w.n_logits:
                targets += w.targets
                any_target = True
            else:
                raise ValueError(f"sequence {len(seqs) - 1}: {len(w.targets)} targets for {w.n_logits} rows with logits")
        self.n_rows = len(targets)
        self._grow_seqs(len(seqs), len(targets))
        self._fill_dampings([damping.as_tuple() for damping in dampings])
        self._seqs[0 : len(seqs)] = seqs
        self._tokens = _assign(self._tokens, tokens)
        self._blocks = _assign(self._blocks, blocks)
        self._history = _assign(self._history, history)
        self._targets = _assign(self._targets, targets)
        batch = self.batch
        batch.n_seqs = len(seqs)
        batch.seqs = self._seqs
        batch.tokens = self._tokens
        batch.blocks = self._blocks
        batch.history = self._history
        batch.targets = self._targets if any_target else ffi.NULL

    def _fill_dampings(self, dampings: list[tuple[float | int, ...]]) -> None:
        if len(dampings) > len(self._dampings):
            self._dampings = ffi.new("colibri_damping[]", 2 * len(dampings))
        self._dampings[0 : len(dampings)] = dampings
        batch = self.batch
        batch.n_dampings = len(dampings)
        batch.dampings = self._dampings
        batch.rerouted = self._rerouted if dampings else ffi.NULL

    def _grow_seqs(self, n_seqs: int, n_rows: int) -> None:
        # More than the session's limits is the engine's to refuse; the arrays must only be large enough to ask.
        if n_seqs > len(self._seqs):
            self._seqs = ffi.new("colibri_seq[]", n_seqs)
            self.seq_status = ffi.new("int32_t[]", n_seqs)
            self._rerouted = ffi.new("int32_t[]", n_seqs)
        if n_rows > len(self.rows):
            self.rows = ffi.new("colibri_row_result[]", n_rows)
        self._see()

    def results(self, work: Sequence[SeqWork]) -> list[SeqResult]:
        """What the step wrote, by sequence."""
        raw = list(_ROW.iter_unpack(self._row_bytes[: self.n_rows * _ROW_SIZE]))
        status = ffi.unpack(self.seq_status, len(work))
        if any(status) or any(row[0] for row in raw):
            return self._results_with_errors(work, status, self._rows(raw))
        rows = self._rows(raw)
        if self.batch.n_dampings:
            return self._results_with_counts(work, rows)
        if self._last:  # a row each
            return [SeqResult(True, "", (row,)) for row in rows]
        ends = list(accumulate([w.n_logits for w in work]))
        return [SeqResult(True, "", tuple(rows[end - w.n_logits : end])) for w, end in zip(work, ends, strict=True)]

    def _results_with_counts(self, work: Sequence[SeqWork], rows: Sequence[RowResult]) -> list[SeqResult]:
        ends = list(accumulate([w.n_logits for w in work]))
        counts = ffi.unpack(self._rerouted, len(work))
        return [SeqResult(True, "", tuple(rows[end - w.n_logits : end]), count) for w, end, count in zip(work, ends, counts, strict=True)]

    def _results_with_errors(self, work: Sequence[SeqWork], status: Sequence[int], rows: Sequence[RowResult]) -> list[SeqResult]:
        results = []
        at = 0
        counts = ffi.unpack(self._rerouted, len(work)) if self.batch.n_dampings else [0] * len(work)
        for w, bad, count in zip(work, status, counts, strict=True):
            first, at = at, at + w.n_logits
            chunk = [self.rows[i] for i in range(first, at)]
            if bad or any(row.status for row in chunk):
                results.append(SeqResult(False, self._sentence(w, chunk), ()))
            else:
                results.append(SeqResult(True, "", tuple(rows[first:at]), count))
        return results

    def _rows(self, raw: Sequence[tuple[Any, ...]]) -> list[RowResult]:
        return [
            RowResult(token, logprob, target_logprob, target_rank, self._top(index, n_top) if n_top else ())
            for index, (_, _, token, n_top, logprob, target_logprob, target_rank) in enumerate(raw)
        ]

    def _top(self, index: int, count: int) -> tuple[tuple[int, float], ...]:
        row = self.rows[index]
        return tuple(zip(ffi.unpack(row.top_tokens, count), ffi.unpack(row.top_logprobs, count), strict=True))

    def _sentence(self, w: SeqWork, chunk: list[Row]) -> str:
        """Names the layer and position of the first row that met a NaN or infinity."""
        last = w.start + len(w.tokens) - 1
        for i, row in enumerate(chunk):
            if row.status:
                where = "the head" if row.error_layer == self._layers else f"layer {row.error_layer}"
                return f"a NaN or infinity arose in {where} at position {last + 1 - len(chunk) + i}"
        return f"a NaN or infinity arose in a layer at one of the positions {w.start} to {last}"

    def step_stats(self) -> StepStats:
        """The last step's statistics."""
        s = self.stats
        counts = s.phases, s.tasks, s.tasks_rerun, s.lanes, s.lanes_lost, s.tasks_homed, s.tasks_local, s.remote_layers, s.remote_ns
        return StepStats(s.step_ns, s.wait_ns, s.serial_ns, *counts, tuple(s.op_ns))


def _assign(array: Array[int], values: list[int]) -> Array[int]:
    """array[0:len] = values, in a larger array if it must be."""
    count = len(values)
    if count > len(array):
        array = ffi.new("int32_t[]", 2 * count)
    array[0:count] = values
    return array


def _decodes(w: SeqWork) -> bool:
    """Whether it is the ordinary share of a step: a token in, a token out."""
    return len(w.tokens) == 1 and w.n_logits == 1 and not w.history and w.targets is None and not w.routes
