"""A node's settings: one frozen object, checked once."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from engine_c.structs import KV_FORMATS
from service.config import ConfigError, check_ranges, read_settings
from service.spans import Range, parse_ranges
from workers.placement import Placement
from workers.segments import LoadMode

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_SHARE = re.compile(r"(\d+)/(\d+)")
_RANGES: dict[str, tuple[float, float]] = {
    "workers_per_node": (0, 255),
    "threads_per_worker": (1, 255),
    "max_rows": (1, 65536),
    "kv_memory": (1, 1 << 48),
    "max_streams": (1, 4096),
    "max_message_bytes": (1, 1 << 30),
    "hang_ms": (0, 3_600_000),
    "start_timeout": (0.1, 86400.0),
    "drain_grace": (0.0, 86400.0),
    "idle_timeout": (0.1, 31 * 86400.0),
}
_LAST_PORT = 65535
_LONGEST_NAME = 253  # as hosts have
_KINDS = ("experts", "share", "layers")
_TLS = ("tls_cert", "tls_key", "tls_ca")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything a node needs to know. Every field can be set by the environment as COLIBRI_<FIELD>, and overridden by keyword."""

    model: Path = Path()  # the container file
    name: str = ""  # stable name of this node; empty: the host's
    experts: str = ""  # of every layer, as "0-31,40"; exactly one of this,
    share: str = ""  # "2/4": the second quarter of every layer's experts; "auto": what front ends assign; and
    layers: str = ""  # run whole, attention and KV cache included, as "16-31"

    host: str = "127.0.0.1"
    port: int = 50061  # 0: any free one
    tls_cert: str = ""  # the node's certificate,
    tls_key: str = ""  # its key, and
    tls_ca: str = ""  # the authority that signs front ends' certificates; all PEM files
    insecure: bool = False  # without the three files, other machines may call unencrypted; this one always may
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None  # Prometheus over HTTP; 0: any free one; None: none

    load: LoadMode = "auto"
    placement: Placement = "auto"  # over NUMA nodes, of what is held
    workers_per_node: int | None = None
    threads_per_worker: int | None = None
    max_rows: int = 512  # computed at a time; longer batches are cut
    kv_memory: int | None = None  # bytes of KV cache for the layers, of all front ends together; None: planned
    kv_format: str = "bf16"  # of that cache, as the front ends have it
    max_streams: int = 32  # front ends at once
    idle_timeout: float = 600.0  # seconds after which a stream is ended over whose connection nothing has come
    max_message_bytes: int = 256 << 20  # of a batch, and of its answer
    hang_ms: int = 1000
    start_timeout: float = 60.0  # seconds for the workers to be ready
    drain_grace: float = 30.0  # seconds that front ends may take to leave after SIGTERM

    def __post_init__(self) -> None:
        _check_kinds({kind: getattr(self, kind) for kind in _KINDS})
        for setting in ("port", "metrics_port"):
            if not 0 <= (getattr(self, setting) or 0) <= _LAST_PORT:
                raise ConfigError(f"{setting} is {getattr(self, setting)}: it must lie between 0 and {_LAST_PORT}")
        if not self.name.isprintable() or len(self.name) > _LONGEST_NAME:
            raise ConfigError(f"name {self.name[:_LONGEST_NAME]!r} must be printable and have {_LONGEST_NAME} characters at the most")
        _ = self.ranges
        if self.kv_format not in KV_FORMATS:
            raise ConfigError(f"kv_format is {self.kv_format!r}: it must be one of {', '.join(KV_FORMATS)}")
        if self.kv_memory is not None and not self.layers:
            raise ConfigError("kv_memory is for layers, which are not set")
        if self.experts:
            parse_experts(self.experts)
        elif self.share and self.share != "auto":
            parse_share(self.share)
        missing = [setting for setting in _TLS if not getattr(self, setting)]
        if missing and len(missing) < len(_TLS):
            raise ConfigError(f"{', '.join(missing)} missing: mutual TLS needs a certificate, its key and an authority")
        if missing and not self.insecure and not _is_loopback(self.host):
            raise ConfigError(f"host {self.host} lets other machines call: give tls_cert, tls_key and tls_ca, or allow that with insecure")
        for setting, choices in {"load": get_args(LoadMode), "placement": get_args(Placement)}.items():
            if getattr(self, setting) not in choices:
                raise ConfigError(f"{setting} is {getattr(self, setting)!r}: it must be one of {', '.join(choices)}")
        check_ranges(self, _RANGES)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """From the environment; keywords that are not None win. Raises ConfigError."""
        settings = read_settings(cls, environ, overrides)
        kinds = {kind: settings.get(kind, "") for kind in _KINDS}
        _check_kinds(kinds, of_environment=[kind for kind in _KINDS if overrides.get(kind) is None])
        return cls(**settings)

    @property
    def secure(self) -> bool:
        """Whether calls are encrypted and both sides show certificates."""
        return bool(self.tls_cert)

    @property
    def assignable(self) -> bool:
        """Whether front ends say what is held."""
        return self.share == "auto"

    @property
    def own_name(self) -> str:
        """The name told."""
        return self.name or socket.gethostname()

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Layers run whole. Raises ConfigError."""
        try:
            return parse_ranges(self.layers) if self.layers else ()
        except ValueError as error:
            raise ConfigError(f"layers {self.layers!r}: {error}") from error

    @property
    def given(self) -> str:
        """What it was told to hold, in words."""
        kinds = {"experts": self.experts, "share": self.share, "layers": self.layers}
        return next(f"{kind} {value}" for kind, value in kinds.items() if value)

    def held(self, experts: int) -> tuple[int, ...]:
        """Of a layer of so many experts, those held from the start. Raises ConfigError."""
        if self.assignable or self.layers:
            return ()
        if self.share:
            index, count = parse_share(self.share)
            if count > experts:
                raise ConfigError(f"share {self.share}: the model has {experts} experts a layer; cut them into {experts} parts at the most")
            return tuple(expert for expert in range(experts) if expert * count // experts == index - 1)
        found = parse_experts(self.experts)
        if found[-1] >= experts:
            raise ConfigError(f"experts {self.experts}: there is no expert {found[-1]}, the model has {experts} a layer")
        return found


def _check_kinds(values: Mapping[str, str], *, of_environment: Collection[str] = ()) -> None:
    """That exactly one says what to hold. Raises ConfigError, which tells those that came from the environment."""
    given = [kind for kind in _KINDS if values[kind]]
    if not given:
        raise ConfigError("give a node either experts, such as 0-31, a share, such as 2/4 or auto, or layers, such as 16-31")
    if len(given) > 1:
        said = (f"{kind} {values[kind]}" + f" (from COLIBRI_{kind.upper()})" * (kind in of_environment) for kind in given)
        raise ConfigError(f"{' and '.join(said)} are given: a node holds by one of them, leave out the other")


def parse_experts(text: str) -> tuple[int, ...]:
    """The numbers that are meant: 0-3,8 is (0, 1, 2, 3, 8). Raises ConfigError."""
    found: set[int] = set()
    for word in text.split(","):
        match = _SPAN.fullmatch(word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match and first > last:
            raise ConfigError(f"experts {text!r}: {word.strip()} is the wrong way round, {last}-{first} is meant")
        if first > last or last >= 1 << 20:
            raise ConfigError(f"experts {text!r}: {word.strip()!r} is neither a number nor a span such as 0-31")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def parse_share(text: str) -> tuple[int, int]:
    """Which part of how many: 2/4 is (2, 4). Raises ConfigError."""
    match = _SHARE.fullmatch(text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"share {text!r}: it must be auto, or a part such as 2/4")
    return int(match[1]), int(match[2])


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
