"""C arrays of a step, kept between steps: filled by slice assignment, grown when a batch needs more, never shrunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_c._engine import ffi
from engine_c.structs import RowResult, SeqResult, SeqWork, SessionOptions, StepStats

if TYPE_CHECKING:
    from engine_c._engine import Array, Row


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

    def fill(self, work: Sequence[SeqWork]) -> None:
        """Copies a batch into the C arrays. What does not fit a C integer raises OverflowError, a wrong type TypeError."""
        tokens: list[int] = []
        blocks: list[int] = []
        history: list[int] = []
        targets: list[int] = []
        seqs: list[tuple[object, ...]] = []
        any_target = False
        for w in work:
            seqs.append((len(w.tokens), w.start, w.n_logits, len(w.blocks), len(w.history), 0, w.sampling.as_tuple()))
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

    def _grow_seqs(self, n_seqs: int, n_rows: int) -> None:
        # More than the session's limits is the engine's to refuse; the arrays must only be large enough to ask.
        if n_seqs > len(self._seqs):
            self._seqs = ffi.new("colibri_seq[]", n_seqs)
            self.seq_status = ffi.new("int32_t[]", n_seqs)
        if n_rows > len(self.rows):
            self.rows = ffi.new("colibri_row_result[]", n_rows)

    def results(self, work: Sequence[SeqWork]) -> list[SeqResult]:
        """What the step wrote, by sequence."""
        rows, status = self.rows, ffi.unpack(self.seq_status, len(work))
        results = []
        at = 0
        for i, w in enumerate(work):
            chunk = [rows[j] for j in range(at, at + w.n_logits)]
            at += w.n_logits
            bad = [row for row in chunk if row.status]
            if bad or status[i]:
                results.append(SeqResult(False, self._sentence(w, chunk), ()))
            else:
                results.append(SeqResult(True, "", tuple([_row(row) for row in chunk])))
        return results

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
        return StepStats(s.step_ns, s.wait_ns, s.serial_ns, s.phases, s.tasks, s.tasks_rerun, s.lanes, s.lanes_lost)


def _assign(array: Array[int], values: list[int]) -> Array[int]:
    """array[0:len] = values, in a larger array if it must be."""
    count = len(values)
    if count > len(array):
        array = ffi.new("int32_t[]", 2 * count)
    array[0:count] = values
    return array


def _row(row: Row) -> RowResult:
    count = row.n_top
    top = tuple(zip(ffi.unpack(row.top_tokens, count), ffi.unpack(row.top_logprobs, count), strict=True)) if count else ()
    return RowResult(row.token, row.logprob, row.target_logprob, row.target_rank, top)
