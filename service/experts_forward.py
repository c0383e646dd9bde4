"""Experts.Forward: one layer's block of experts on a caller's own hidden states, between the steps of everybody else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri.v1 import experts_pb2 as pb
from service.faults import InvalidField, shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine_c import Session
    from engine_c.route import Routed
    from service.served import ServedModel

PIECE_ROWS = 64
"""Rows done between two steps: about as long as a step of so many tokens' experts in one layer."""
_DTYPES = {pb.DATA_TYPE_F32: 4, pb.DATA_TYPE_BF16: 2}
_NAMED = 8  # bad rows that a refusal names


@dataclass(frozen=True, slots=True)
class Block:
    """What a layer's block gave for some rows: out [n, hidden]."""

    out: npt.NDArray[np.float32]
    routed: Routed


def read_hidden(request: pb.ForwardRequest, model: ServedModel, *, largest: int) -> npt.NDArray[np.float32]:
    """The rows [T, hidden]. `largest`: bytes that the answer may have. Raises InvalidField."""
    tensor, width = request.hidden, model.info.hidden
    if request.layer not in model.artifact.routed_layers:
        raise InvalidField("layer", f"is {request.layer}, a layer of {shown(model.name)} without a router")
    if tensor.dtype not in _DTYPES:
        name = pb.DataType.Name(tensor.dtype) if tensor.dtype in pb.DataType.values() else tensor.dtype
        raise InvalidField("hidden.dtype", f"is {name}; give DATA_TYPE_F32 or DATA_TYPE_BF16")
    shape, size = list(tensor.shape), _DTYPES[tensor.dtype]
    if len(shape) != 2 or shape[0] < 1 or shape[1] != width:
        raise InvalidField("hidden.shape", f"is {shape[:8]}; give [rows, {width}], at least one row")
    if len(tensor.data) != size * shape[0] * width:
        raise InvalidField(
            "hidden.data", f"has {len(tensor.data)} bytes; {shape[0]} rows of {width} elements take {size * shape[0] * width}"
        )
    each = size * width + 8 * model.info.top_k
    if shape[0] * each > largest:
        raise InvalidField(
            "hidden", f"has {shape[0]} rows; the answer would have more than {largest} bytes: give at most {largest // each}"
        )
    return _finite(_as_floats(tensor).reshape(shape))


def run_block(session: Session, layer: int, x: npt.NDArray[np.float32], *, weighs_input: bool) -> Block:
    """Routes rows and computes their experts; weighs_input: as Artifact has it. On the engine's thread, between steps. EngineError."""
    import numpy as np

    from engine_c.remote import ExpertBatch
    from engine_c.route_rows import route_rows

    routed = route_rows(session, layer, x)
    k = routed.ids.shape[1]
    order = np.argsort(routed.ids.reshape(-1), kind="stable")  # by expert, rows ascending
    rows = (order // k).astype(np.int32)
    experts, counts = np.unique(routed.ids, return_counts=True)
    weights = routed.weights.reshape(-1)[order]
    batch = ExpertBatch(layer, tuple(experts.tolist()), tuple(counts.tolist()), x.tobytes(), len(x), rows.tobytes(), weights.tobytes())
    pairs = np.frombuffer(session.run_experts(batch, kind="f32"), np.float32).reshape(-1, x.shape[1])
    out = np.zeros_like(x)
    factors = np.ones_like(weights) if weighs_input else weights
    ends = np.cumsum(counts)
    for start, end in zip(ends - counts, ends, strict=True):  # a row is there once for an expert
        out[rows[start:end]] += factors[start:end, None] * pairs[start:end]
    return Block(out, routed)


def forward_response(request: pb.ForwardRequest, model: ServedModel, blocks: list[Block]) -> pb.ForwardResponse:
    """The answer of blocks whose rows follow each other."""
    import numpy as np

    out = np.concatenate([block.out for block in blocks])
    ids = np.concatenate([block.routed.ids for block in blocks])
    weights = np.concatenate([block.routed.weights for block in blocks])
    return pb.ForwardResponse(
        model=model.name,
        hidden=pb.Tensor(dtype=request.hidden.dtype, shape=out.shape, data=_as_bytes(out, request.hidden.dtype)),
        experts=pb.Tensor(dtype=pb.DATA_TYPE_I32, shape=ids.shape, data=ids.astype("<i4").tobytes()),
        weights=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=weights.shape, data=weights.astype("<f4").tobytes()),
    )


def _as_floats(tensor: pb.Tensor) -> npt.NDArray[np.float32]:
    import numpy as np

    if tensor.dtype == pb.DATA_TYPE_F32:
        return np.frombuffer(tensor.data, "<f4").astype(np.float32)
    return (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _as_bytes(x: npt.NDArray[np.float32], dtype: pb.DataType) -> bytes:
    """Rounded to the nearest, ties to even, where the answer is bf16."""
    import numpy as np

    if dtype == pb.DATA_TYPE_F32:
        return x.astype("<f4").tobytes()
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def _finite(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    import numpy as np

    bad = np.flatnonzero(~np.isfinite(x).all(axis=1))
    if len(bad):
        rows = ", ".join(map(str, bad[:_NAMED].tolist())) + (f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else "")
        raise InvalidField("hidden.data", f"has NaN or infinite elements in row {rows}")
    return x
