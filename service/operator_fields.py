"""What operators' requests say, checked: InvalidField names what is out of range."""

from __future__ import annotations

from colibri.v1 import operator_pb2 as pb
from service.faults import InvalidField
from service.load import SPANS

_MOST = 255  # workers of a node, threads of a worker
_INTERVAL_MS = (50, 60_000)
_DEFAULT_INTERVAL_MS = 1000
_LONGEST_GRACE = 86400.0  # seconds


def load_settings(request: pb.LoadModelRequest) -> dict[str, object]:
    """What a model is to have otherwise than the server's own settings say."""
    settings: dict[str, object] = {}
    if request.HasField("workers_per_node"):
        settings["workers_per_node"] = within(request, "workers_per_node", 0)
    if request.HasField("threads_per_worker"):
        settings["threads_per_worker"] = within(request, "threads_per_worker", 1)
    if request.HasField("kv_memory"):
        settings["kv_memory"] = request.kv_memory
    if request.load:
        settings["load"] = request.load
    return settings


def within(request: pb.LoadModelRequest | pb.ScaleWorkersRequest, field: str, least: int) -> int:
    """The value of a field."""
    value: int = getattr(request, field)
    if not least <= value <= _MOST:
        raise InvalidField(field, f"is {value}; it must lie between {least} and {_MOST}")
    return value


def unload_grace(request: pb.UnloadModelRequest) -> float | None:
    """Seconds; None: the server's own."""
    if not request.HasField("grace_seconds"):
        return None
    grace = request.grace_seconds
    if not 0 <= grace <= _LONGEST_GRACE:
        raise InvalidField("grace_seconds", f"is {grace}; it must lie between 0 and {_LONGEST_GRACE:.0f}")
    return grace


def watch_interval(request: pb.WatchStatsRequest) -> float:
    """Seconds."""
    wish = request.interval_ms if request.HasField("interval_ms") else _DEFAULT_INTERVAL_MS
    least, most = _INTERVAL_MS
    if not least <= wish <= most:
        raise InvalidField("interval_ms", f"is {wish}; it must lie between {least} and {most}")
    return wish / 1000


def watch_windows(request: pb.WatchStatsRequest) -> list[float]:
    """Their spans."""
    spans = list(dict.fromkeys(map(float, request.windows)))
    if wrong := [span for span in spans if span not in SPANS]:
        raise InvalidField("windows", f"has {wrong[0]:g}; there are windows of {', '.join(f'{span:g}' for span in SPANS)} seconds")
    return spans
