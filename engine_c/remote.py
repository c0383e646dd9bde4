"""Experts and layers that are computed elsewhere: what a step hands out, and what a node computes for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from engine_c._engine import ffi, lib
from engine_c.structs import SeqWork

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine_c._engine import Error, Pointer

RowsKind = Literal["prepared", "f32", "bf16"]
ROWS_KINDS: dict[RowsKind, int] = {"prepared": 0, "f32": 1, "bf16": 2}
Buffer = bytes | bytearray | memoryview
Check = Callable[[int], None]


class RemoteLost(Exception):
    """Outputs can't be had from anybody; the step is given up and may be tried again. Says why."""


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """Mini-batches of one layer. rows: n_rows distinct rows, one after another; pairs, expert by expert, have the index of their row in
    row_of_pair (i32) and, for models that weigh what an expert reads, their weight (f32; else empty)."""

    layer: int
    experts: tuple[int, ...]  # ascending
    counts: tuple[int, ...]  # pairs of each
    rows: Buffer
    n_rows: int
    row_of_pair: Buffer
    weights: Buffer = b""

    @property
    def pairs(self) -> int:
        """Of a row and an expert."""
        return sum(self.counts)


class Remote(Protocol):
    """Who has experts computed elsewhere. Called on the thread that steps, once a layer that has remote experts at work."""

    def send(self, call: RemoteExperts) -> None:
        """Hands the batches out; returns at once. Then the experts that are computed here run."""
        ...

    def receive(self, call: RemoteExperts) -> None:
        """Returns when nothing is missing. RemoteLost gives the step up."""
        ...


class LayersRemote(Remote, Protocol):
    """Who has layers computed elsewhere too."""

    def run_layers(self, call: RemoteLayers) -> None:
        """Puts the residual stream behind the layers into call.x. RemoteLost gives the step up."""
        ...


class RemoteExperts:
    """One layer of a step that waits. Valid until `receive` returns."""

    def __init__(self, session: Pointer, error: Error, check: Check, row_bytes: Sequence[int]) -> None:
        state = ffi.new("colibri_remote *")
        check(lib.colibri_remote_state(session, state))
        self.layer: int = state.layer
        self.counts: dict[int, int] = dict(
            zip(ffi.unpack(state.experts, state.n_experts), ffi.unpack(state.rows, state.n_experts), strict=True)
        )
        """Rows of each remote expert at work, ascending."""
        self.missing: set[int] = set(self.counts)
        """Those whose outputs are not there yet."""
        self._session, self._error, self._check, self._weighs_input = session, error, check, bool(state.weighs_input)
        self._n_rows, self._row_bytes = state.n_rows, row_bytes[self.layer]

    def pack(self, experts: Sequence[int]) -> ExpertBatch:
        """The mini-batches of these experts, ascending."""
        counts = tuple(self.counts[expert] for expert in experts)
        pairs = sum(counts)
        rows = bytearray(min(pairs, self._n_rows) * self._row_bytes)
        row_of_pair = bytearray(4 * pairs)
        weights = bytearray(4 * pairs if self._weighs_input else 0)
        n_rows = ffi.new("int32_t *")
        weigh = ffi.from_buffer("float[]", weights) if weights else ffi.NULL
        into = ffi.from_buffer("char[]", rows), ffi.from_buffer("int32_t[]", row_of_pair), weigh
        self._check(lib.colibri_remote_pack(self._session, list(experts), len(experts), *into, n_rows, self._error))
        used = memoryview(rows)[: n_rows[0] * self._row_bytes]
        return ExpertBatch(self.layer, tuple(experts), counts, bytes(used), n_rows[0], bytes(row_of_pair), bytes(weights))

    def put(self, experts: Sequence[int], outputs: Buffer) -> None:
        """Takes f32 [pairs, hidden], in the order of pack(experts). EngineError for a wrong length."""
        given = ffi.from_buffer("char[]", outputs)
        self._check(lib.colibri_remote_put(self._session, list(experts), len(experts), given, len(ffi.buffer(given)), self._error))
        self.missing.difference_update(experts)

    def compute(self, experts: Sequence[int]) -> None:
        """Does these here, from the weights that this process maps."""
        self._check(lib.colibri_remote_compute(self._session, list(experts), len(experts), self._error))
        self.missing.difference_update(experts)


@dataclass(frozen=True, slots=True)
class RemoteLayers:
    """A step that stands before layers [first, end). Valid until `run_layers` returns."""

    first: int
    end: int
    work: Sequence[SeqWork]
    x: npt.NDArray[np.float32]
    """[rows, hidden], to be overwritten: `call.x[:] = found`. A row of NaN is bad."""


def layers_of(session: Pointer, hidden: int, work: Sequence[SeqWork]) -> RemoteLayers | None:
    """What a step that waits wants, if that is layers."""
    import numpy as np

    state, stride = ffi.new("colibri_remote *"), ffi.new("int64_t *")
    if lib.colibri_remote_state(session, state) or state.kind != lib.COLIBRI_REMOTE_LAYERS:
        return None
    raw = ffi.buffer(lib.colibri_remote_x(session, stride), 4 * state.n_rows * stride[0])
    return RemoteLayers(state.layer, state.end, work, np.frombuffer(raw, np.float32).reshape(state.n_rows, stride[0])[:, :hidden])
