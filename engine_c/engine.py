"""Typed wrapper of the C engine's session. Every call that computes or waits releases the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from engine_c._engine import ffi, lib
from engine_c.basics import EngineError
from engine_c.batch import BatchBuffers
from engine_c.lanes import Lanes
from engine_c.library import fail
from engine_c.model import Model
from engine_c.remote import ROWS_KINDS, ExpertBatch, LayersRemote, Remote, RemoteExperts, RowsKind, layers_of
from engine_c.routing import Routes, Telemetry, empty_telemetry
from engine_c.structs import SeqResult, SeqWork, SessionOptions, StepStats

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine_c._engine import Pointer


def session_bytes(model: Model, options: SessionOptions) -> int:
    """Bytes of shared memory a session needs. EngineError EINVAL if the options are out of range."""
    count = lib.colibri_session_bytes(model._pointer, ffi.new("colibri_session_options *", options.as_tuple()))
    if not count:
        raise EngineError(lib.COLIBRI_EINVAL, f"the session options are out of range: {options}")
    return count


class Session(Lanes):
    """The front end's side of a team. One thread steps it; the lane_* calls may come from any thread while it is open."""

    _kind = "session"

    def __init__(self, model: Model, options: SessionOptions) -> None:
        out, err = ffi.new("colibri_session **"), ffi.new("colibri_error *")
        if lib.colibri_session_open(model._pointer, ffi.new("colibri_session_options *", options.as_tuple()), out, err):
            raise fail(err)
        super().__init__(out[0], lib.colibri_session_close, model, options)
        self.team_fd = lib.colibri_session_team_fd(out[0])
        self.arena_fd = lib.colibri_session_arena_fd(out[0])
        self._buffers = BatchBuffers(options, model.info.layers)
        self._error = ffi.new("colibri_error *")
        self._row_bytes = [lib.colibri_prepared_bytes(out[0], layer) for layer in range(model.info.layers)]

    def step(
        self, work: Sequence[SeqWork], *, tell: int = -1, remote: Remote | LayersRemote | None = None
    ) -> tuple[list[SeqResult], StepStats]:
        """Runs all layers for one batch, results in its order. On EngineError only KV of earlier steps' positions may be used.

        tell >= 0: an eventfd to write to once the first layer's experts are under way. From Python it could not be done so late: who waits
        for it would take the interpreter, and the step would begin only when it gives it back.
        remote: who has the experts and layers of set_remote computed; its RemoteLost gives the step up.
        """
        buffers = self._buffers
        buffers.fill(work)
        status = lib.colibri_front_step(tell, self._pointer, buffers.batch, buffers.rows, buffers.seq_status, buffers.stats, self._error)
        try:
            while status == lib.COLIBRI_NEEDS_REMOTE:
                self._hand_out(remote, work)
                status = lib.colibri_step_resume(self._pointer, buffers.rows, buffers.seq_status, buffers.stats, self._error)
            self._check(status)
        except BaseException:
            lib.colibri_step_abandon(self._pointer)
            buffers.n_rows = 0
            raise
        results = buffers.results(work)
        if any(w.routes for w in work):
            results = self._with_routes(work, results)
        return results, buffers.step_stats()

    def _hand_out(self, remote: Remote | LayersRemote | None, work: Sequence[SeqWork]) -> None:
        if remote is None:
            raise EngineError(lib.COLIBRI_ESTATE, "some experts are computed elsewhere, and nobody was named who has that done")
        layers = layers_of(self._pointer, self.model.info.hidden, work)
        if layers is not None:
            run_layers = getattr(remote, "run_layers", None)
            if run_layers is None:
                raise EngineError(lib.COLIBRI_ESTATE, "some layers are computed elsewhere, and who was named does only experts")
            run_layers(layers)
            return
        call = RemoteExperts(self._pointer, self._error, self._check, self._row_bytes)
        remote.send(call)
        self._check(lib.colibri_step_local(self._pointer, self._error))
        remote.receive(call)

    def _check(self, status: int) -> None:
        if status:
            raise fail(self._error)

    def set_remote(self, experts: npt.NDArray[np.bool_] | None, layers: Sequence[tuple[int, int]] = ()) -> None:
        """Says which experts [layers, experts] are computed elsewhere from the next step on, None: none, which needs split_down; and which
        ranges [first, end) of whole layers."""
        self._check(lib.colibri_session_remote_layers(self._pointer, ffi.new("int32_t[][2]", list(layers)), len(layers), self._error))
        if experts is None:
            self._check(lib.colibri_session_remote(self._pointer, ffi.NULL, self._error))
            return
        if experts.shape != (self.model.info.layers, self.model.info.experts):
            raise EngineError(lib.COLIBRI_EINVAL, f"remote experts {experts.shape}: it must be the model's layers and experts")
        raw = experts.astype("u1", order="C")
        self._check(lib.colibri_session_remote(self._pointer, ffi.from_buffer("uint8_t[]", raw), self._error))

    def run_experts(self, batch: ExpertBatch, *, kind: RowsKind = "prepared") -> bytearray:
        """Computes another session's mini-batches: f32 [pairs, hidden], not weighted. EngineError for a batch that is malformed or larger
        than max_rows rows or max_rows * top_k pairs. Needs split_down."""
        pairs = batch.pairs
        if len(batch.counts) != len(batch.experts) or len(batch.row_of_pair) != 4 * pairs or len(batch.weights) not in (0, 4 * pairs):
            raise EngineError(lib.COLIBRI_EINVAL, f"counts, rows or weights do not fit {len(batch.experts)} experts with {pairs} pairs")
        experts, counts = ffi.new("int32_t[]", batch.experts), ffi.new("int32_t[]", batch.counts)
        rows, numbers = ffi.from_buffer("char[]", batch.rows), ffi.from_buffer("int32_t[]", batch.row_of_pair)
        weights = ffi.from_buffer("float[]", batch.weights) if batch.weights else ffi.NULL
        sizes = batch.layer, ROWS_KINDS[kind], len(batch.experts), batch.n_rows
        work = ffi.new("colibri_expert_work *", (*sizes, experts, counts, rows, len(batch.rows), numbers, weights))
        out = bytearray(4 * pairs * self.model.info.hidden)
        self._check(lib.colibri_experts_run(self._pointer, work, ffi.from_buffer("float[]", out), self._error))
        return out

    def run_moe(
        self, layer: int, x: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """What a layer's block of experts returns for normed rows [n, hidden], without the residual, and the experts and weights
        [n, top_k] it chose. A row with a NaN becomes NaN. Between steps. EngineError also EUNSUPPORTED, where the router reads the
        residual."""
        import numpy as np

        out = self._rows_of(x)
        experts, weights = np.empty((len(out), self.model.info.top_k), np.int32), np.empty((len(out), self.model.info.top_k), np.float32)
        into = ffi.from_buffer("int32_t *", experts, require_writable=True), _floats(weights)
        self._check(lib.colibri_moe_run(self._pointer, layer, _floats(out), len(out), *into, self._error))
        return out, experts, weights

    def run_layers(self, work: Sequence[SeqWork], first: int, end: int, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Runs layers [first, end) with this session's KV blocks: the residual stream [rows, hidden] behind them, from that before them.
        Tokens, logits and damping of work do not matter. A row that met a NaN becomes NaN. Between steps."""
        out, buffers = self._rows_of(x), self._buffers
        if len(out) != sum(len(w.tokens) for w in work):
            raise EngineError(lib.COLIBRI_EINVAL, f"x has {len(out)} rows, the sequences have {sum(len(w.tokens) for w in work)}")
        buffers.fill(work)
        buffers.n_rows = 0
        self._check(lib.colibri_layers_run(self._pointer, buffers.batch, first, end, _floats(out), buffers.seq_status, self._error))
        return out

    def _rows_of(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        import numpy as np

        if x.ndim != 2 or x.shape[1] != self.model.info.hidden:
            raise EngineError(lib.COLIBRI_EINVAL, f"x has shape {x.shape}, it must be [rows, {self.model.info.hidden}]")
        return np.array(x, np.float32, order="C")

    def _with_routes(self, work: Sequence[SeqWork], results: list[SeqResult]) -> list[SeqResult]:
        ends = list(accumulate(len(w.tokens) for w in work))
        experts, weights, margins = self._copy_routes(ends[-1])
        found = []
        for w, end, result in zip(work, ends, results, strict=True):
            at = slice(end - len(w.tokens), end)
            routes = Routes(experts[:, at].copy(), weights[:, at].copy(), margins[:, at].copy()) if w.routes else None
            found.append(result._replace(routes=routes))
        return found

    def logits(self) -> npt.NDArray[np.float32]:
        """A copy of the last step's logits [rows with logits, vocab]."""
        import numpy as np

        pointer, shape = self._pointer, (self._buffers.n_rows, self.model.info.vocab)
        if not shape[0]:
            return np.empty(shape, np.float32)
        raw = ffi.buffer(lib.colibri_session_logits(pointer), 4 * shape[0] * shape[1])
        return np.frombuffer(raw, np.float32).reshape(shape).copy()

    def routes(self, rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Experts and their weights of the last step [router_layers, rows, top_k]; rows is that step's token count. Needs trace_routes."""
        experts, weights, _ = self._copy_routes(rows)
        return experts, weights

    def _copy_routes(self, rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        import numpy as np

        shape = (self.model.info.router_layers, rows, self.model.info.top_k)
        experts, weights, margins = np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(shape[:2], np.float32)
        into = ffi.from_buffer("int32_t *", experts, require_writable=True), _floats(weights), _floats(margins)
        if lib.colibri_session_routes(self._pointer, *into, experts.size, self._error):
            raise fail(self._error)
        return experts, weights, margins

    def telemetry(self) -> Telemetry:
        """What the router and the dispatcher have counted since the session was opened. Any thread, also while a step runs."""
        info = self.model.info
        counts = empty_telemetry(info.layers, info.experts)
        into = ffi.new("colibri_telemetry *", {"layers": info.layers, "experts": info.experts})
        for name in Telemetry.__slots__:
            setattr(into, name, ffi.from_buffer("uint64_t *", getattr(counts, name), require_writable=True))
        err = ffi.new("colibri_error *")
        if lib.colibri_session_telemetry(self._pointer, into, err):
            raise fail(err)
        return counts

    def expert_counts(self) -> npt.NDArray[np.uint64]:
        """Tokens each expert has had since the session was opened [layers, experts]."""
        import numpy as np

        counts = np.zeros((self.model.info.layers, self.model.info.experts), np.uint64)
        err = ffi.new("colibri_error *")
        into = ffi.from_buffer("uint64_t *", counts, require_writable=True)
        if lib.colibri_session_expert_counts(self._pointer, into, counts.size, err):
            raise fail(err)
        return counts

    def kv_range(self, kv_head: int) -> tuple[int, int]:
        """Offset and bytes of a KV head's keys and values in the arena segment."""
        found = ffi.new("uint64_t[]", 2)
        if status := lib.colibri_session_kv_range(self._pointer, kv_head, found, found + 1):
            raise EngineError(status, f"KV head {kv_head} is not one of the model's {self.model.info.kv_heads}")
        return found[0], found[1]


def _floats(array: npt.NDArray[np.float32]) -> Pointer:
    return ffi.from_buffer("float *", array, require_writable=True)
