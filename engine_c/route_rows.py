"""A model's own router on rows that come from outside (colibri_route_rows)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_c._engine import ffi, lib
from engine_c.engine import Session
from engine_c.library import fail
from engine_c.route import Routed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def route_rows(session: Session, layer: int, x: npt.NDArray[np.float32]) -> Routed:
    """Routes normed rows [n, hidden], n at most the session's max_rows. On the session's one thread, between steps. EngineError EINVAL,
    EUNSUPPORTED."""
    import numpy as np

    rows = np.ascontiguousarray(x, np.float32)
    if rows.ndim != 2 or rows.shape[1] != session.model.info.hidden:
        raise ValueError(f"rows have shape {rows.shape}, wanted [n, {session.model.info.hidden}]")
    shape = (len(rows), session.model.info.top_k)
    ids, weights, bad = np.empty(shape, np.int32), np.empty(shape, np.float32), np.empty(len(rows), np.bool_)
    into = ffi.from_buffer("int32_t *", ids, True), ffi.from_buffer("float *", weights, True), ffi.from_buffer("uint8_t *", bad, True)
    err = ffi.new("colibri_error *")
    if lib.colibri_route_rows(session._pointer, layer, ffi.from_buffer("float *", rows), len(rows), *into, err):
        raise fail(err)
    return Routed(ids, weights, bad)
