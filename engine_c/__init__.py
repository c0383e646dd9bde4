"""The engine: a mixture-of-experts transformer for CPUs, in C, with this typed wrapper. Imports the standard library and cffi only.

Each name is imported when it is first asked for: a worker, which needs few of them, starts in half the time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_c.basics import EngineError, Part
    from engine_c.engine import Session, session_bytes
    from engine_c.lanes import Worker
    from engine_c.library import OPERATIONS, isa_available, isa_name, isa_select, version
    from engine_c.model import Model
    from engine_c.remote import ExpertBatch, LayersRemote, Remote, RemoteExperts, RemoteLayers, RemoteLost, RowsKind
    from engine_c.route import Routed, Router, route_logits
    from engine_c.routing import RUN_BUCKETS, Damping, Routes, Telemetry
    from engine_c.structs import (
        FORMATS,
        GREEDY,
        KV_BLOCK,
        KV_FORMATS,
        LANE_ACTIVE,
        LANE_DEAD,
        LANE_EMPTY,
        LANE_LEAVING,
        LANE_READY,
        MAX_TOP_LOGPROBS,
        ModelInfo,
        RowResult,
        Sampling,
        SeqResult,
        SeqWork,
        SessionOptions,
        StepStats,
    )

__all__ = [
    "FORMATS",
    "GREEDY",
    "KV_BLOCK",
    "KV_FORMATS",
    "LANE_ACTIVE",
    "LANE_DEAD",
    "LANE_EMPTY",
    "LANE_LEAVING",
    "LANE_READY",
    "MAX_TOP_LOGPROBS",
    "OPERATIONS",
    "RUN_BUCKETS",
    "Damping",
    "EngineError",
    "ExpertBatch",
    "LayersRemote",
    "Model",
    "ModelInfo",
    "Part",
    "Remote",
    "RemoteExperts",
    "RemoteLayers",
    "RemoteLost",
    "Routed",
    "Router",
    "Routes",
    "RowResult",
    "RowsKind",
    "Sampling",
    "SeqResult",
    "SeqWork",
    "Session",
    "SessionOptions",
    "StepStats",
    "Telemetry",
    "Worker",
    "isa_available",
    "isa_name",
    "isa_select",
    "route_logits",
    "session_bytes",
    "version",
]

# Where they are but for those of structs.
_HOMES = {
    "basics": ("EngineError", "Part"),
    "engine": ("Session", "session_bytes"),
    "lanes": ("Worker",),
    "library": ("OPERATIONS", "isa_available", "isa_name", "isa_select", "version"),
    "model": ("Model",),
    "remote": ("ExpertBatch", "LayersRemote", "Remote", "RemoteExperts", "RemoteLayers", "RemoteLost", "RowsKind"),
    "route": ("Routed", "Router", "route_logits"),
    "routing": ("RUN_BUCKETS", "Damping", "Routes", "Telemetry"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "structs")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
