"""Expert mini-batches: checked as they come from the wire, and weighted sums of what they gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from colibri.v1 import experts_pb2 as pb
from engine_c.remote import ExpertBatch

Kind = Literal["prepared", "f32", "bf16"]

_KINDS: dict[int, tuple[Kind, int]] = {
    pb.DATA_TYPE_F32: ("f32", 4),
    pb.DATA_TYPE_BF16: ("bf16", 2),
    pb.DATA_TYPE_PREPARED: ("prepared", 0),
}


class BatchError(ValueError):
    """A batch is malformed; the sentence names the field."""


@dataclass(frozen=True, slots=True)
class Work:
    """A checked batch. weights: of each pair, if the answer is to be summed over the experts."""

    batch: ExpertBatch
    kind: Kind
    rows: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None

    def pieces(self, max_rows: int, top_k: int) -> Iterator[ExpertBatch]:
        """The batch, in parts that a session of max_rows takes, in the order of its pairs."""
        if self.batch.n_rows <= max_rows and len(self.rows) <= max_rows * top_k:
            yield self.batch
            return
        data = np.frombuffer(self.batch.rows, np.uint8).reshape(self.batch.n_rows, -1)
        weights = np.frombuffer(self.batch.weights, np.float32)
        experts = np.repeat(self.batch.experts, self.batch.counts)
        for begin in range(0, len(self.rows), max_rows):
            here = slice(begin, begin + max_rows)
            distinct, numbers = np.unique(self.rows[here], return_inverse=True)
            names, counts = np.unique(experts[here], return_counts=True)
            yield ExpertBatch(
                layer=self.batch.layer,
                experts=tuple(names.tolist()),
                counts=tuple(counts.tolist()),
                rows=data[distinct].tobytes(),
                n_rows=len(distinct),
                row_of_pair=numbers.astype(np.int32).tobytes(),
                weights=weights[here].tobytes(),
            )

    def combine(self, outputs: bytes | bytearray, hidden: int) -> bytes | bytearray:
        """Each row's outputs times their weights, added up in ascending order of experts."""
        if self.weights is None:
            return outputs
        pairs = np.frombuffer(outputs, np.float32).reshape(-1, hidden)
        total = np.zeros((self.batch.n_rows, hidden), np.float32)
        at = 0
        for count in self.batch.counts:
            here = slice(at, at + count)
            total[self.rows[here]] += self.weights[here, None] * pairs[here]  # a row is there once for an expert: checked
            at += count
        return total.tobytes()


def check(message: pb.ExpertBatch, *, hidden: int, experts_of: Sequence[int], largest: int, prepared: bool) -> Work:
    """What a message asks for. experts_of: how many each layer has. largest: bytes that an answer may have. prepared: whether rows may be.
    Raises BatchError."""
    experts, counts = tuple(message.experts), tuple(message.counts)
    _check_experts(message.layer, experts, counts, experts_of)
    pairs = sum(counts)
    if pairs * hidden * 4 > largest:
        raise BatchError(f"counts: {pairs} pairs give an answer of more than {largest} bytes; ask for fewer at a time")
    if message.weights and message.rows * hidden * 4 > largest:
        raise BatchError(f"rows: {message.rows} of them give an answer of more than {largest} bytes; send fewer at a time")
    data, input_weights = message.data, message.input_weights  # each look at a field of bytes copies it
    kind = _check_rows(message.dtype, message.rows, len(data), hidden, prepared=prepared)
    row_of_pair = message.row_of_pair or _as_they_come(pairs, message.rows)
    rows = _check_pairs(row_of_pair, counts, message.rows)
    weights = _floats("weights", message.weights, pairs)
    _floats("input_weights", input_weights, pairs)
    batch = ExpertBatch(
        layer=message.layer,
        experts=experts,
        counts=counts,
        rows=data,
        n_rows=message.rows,
        row_of_pair=row_of_pair,
        weights=input_weights,
    )
    return Work(batch, kind, rows, weights)


def _check_experts(layer: int, experts: tuple[int, ...], counts: tuple[int, ...], experts_of: Sequence[int]) -> None:
    if layer >= len(experts_of):
        raise BatchError(f"layer: there is no layer {layer}, the model has {len(experts_of)}")
    if not experts:
        raise BatchError("experts: at least one is needed")
    if max(experts) >= experts_of[layer]:
        raise BatchError(f"experts: there is no expert {max(experts)}, layer {layer} has {experts_of[layer]}")
    if any(a >= b for a, b in pairwise(experts)):
        raise BatchError("experts: they must ascend, each once")
    if len(counts) != len(experts):
        raise BatchError(f"counts: {len(counts)} of them for {len(experts)} experts")
    if min(counts) < 1:
        raise BatchError("counts: each must be at least 1")


def _check_rows(dtype: int, rows: int, length: int, hidden: int, *, prepared: bool) -> Kind:
    if dtype not in _KINDS:
        raise BatchError(f"dtype: {dtype} is none of DATA_TYPE_F32, DATA_TYPE_BF16 and DATA_TYPE_PREPARED")
    kind, size = _KINDS[dtype]
    if kind == "prepared" and not prepared:
        raise BatchError("dtype: DATA_TYPE_PREPARED needs OpenStream.protocol and OpenStream.model_digest; send F32 or BF16")
    if rows < 1:
        raise BatchError("rows: at least one is needed")
    if size and length != rows * hidden * size:
        raise BatchError(f"data: its length is {length} bytes, {rows} rows of {hidden} elements take {rows * hidden * size}")
    if length == 0 or length % rows:
        raise BatchError(f"data: its length is {length} bytes, which {rows} rows do not divide")
    return kind


def _as_they_come(pairs: int, rows: int) -> bytes:
    if pairs != rows:
        raise BatchError(f"row_of_pair: it is empty, but there are {pairs} pairs and {rows} rows")
    return np.arange(pairs, dtype=np.int32).tobytes()


def _check_pairs(row_of_pair: bytes, counts: tuple[int, ...], limit: int) -> npt.NDArray[np.int32]:
    pairs = sum(counts)
    if len(row_of_pair) != 4 * pairs:
        raise BatchError(f"row_of_pair: its length is {len(row_of_pair)} bytes, {pairs} pairs take {4 * pairs}")
    rows = np.frombuffer(row_of_pair, np.int32)
    if rows.min() < 0 or rows.max() >= limit:
        raise BatchError(f"row_of_pair: every row must be below {limit}")
    if pairs > len(counts):  # some expert has two
        ascends = rows[1:] > rows[:-1]
        ascends[np.cumsum(counts[:-1], dtype=np.int64) - 1] = True  # where the next expert's rows begin
        if not ascends.all():
            raise BatchError("row_of_pair: an expert's rows must ascend, each once")
    return rows


def _floats(field: str, data: bytes, count: int) -> npt.NDArray[np.float32] | None:
    if not data:
        return None
    if len(data) != 4 * count:
        raise BatchError(f"{field}: its length is {len(data)} bytes, {count} pairs take {4 * count}")
    return np.frombuffer(data, np.float32)
