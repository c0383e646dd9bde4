"""The server's settings: one frozen object, checked once. The only module that reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, get_args

from engine_c import Damping
from engine_c.structs import KV_FORMATS
from service.damping import DampingError, parse_damping
from service.nodes.addresses import AddressError, file_of, parse_places
from service.spans import Range, parse_ranges

_PREFIX = "COLIBRI_"
_OTHERS = ("CACHE", "ISA", "RUNTIME")  # read by cache_dir, by the engine and by runtime_dirs
# What Kubernetes puts into the pods beside a Service called colibri or colibri-SOMETHING, as NAME=VALUE.
_KUBERNETES = re.compile(r"COLIBRI(_\w+)?_(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=|PORT=\w+://).*")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
Load = Literal["auto", "map", "memfd"]
Placement = Literal["auto", "experts", "rows", "replicate", "none"]
FrontLane = Literal["auto", "on", "off"]
Rebalance = Literal["off", "auto"]
LocalExperts = Literal["none", "all"]
Fallback = Literal["file", "off"]


class ConfigError(ValueError):
    """A setting, or the model file, is wrong; the sentence names it and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything a server needs to know. Every field can be set by the environment as COLIBRI_<FIELD>, and overridden by keyword."""

    model: Path = Path()  # the container file
    name: str = ""  # served under this name; empty: the container's own

    host: str = "127.0.0.1"
    port: int = 50051  # 0: any free one
    unix_socket: str = ""  # listen on this path instead of host and port
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None  # Prometheus over HTTP; 0: any free one; None: none
    metrics_experts: bool = False  # a counter for every expert of every layer too: many, with large models

    operator_socket: str = "auto"  # where operators ask: a path, "none", or "auto": by port in runtime_dir()
    operator_address: str = ""  # host:port for operators elsewhere, with mutual TLS:
    operator_cert: str = ""  # the server's certificate,
    operator_key: str = ""  # its key, and
    operator_ca: str = ""  # the authority that signs operators' certificates; all PEM files

    load: Load = "auto"  # weights: "map" the file, copy to a sealed "memfd" on huge pages, or "auto": the copy if memory is plenty
    placement: Placement = "auto"  # of the weights on NUMA nodes: whole "experts", "rows" of each, "replicate", "none"; "auto" decides
    rebalance: Rebalance = "off"  # "auto": whole experts move between NUMA nodes, and get copies there, as the load asks for
    rebalance_interval: float = 30.0  # seconds between two looks at the load
    rebalance_replicas: int = 0  # further copies of experts that each layer may have in all

    nodes: str = ""  # where nodes are that compute experts: dns:///NAME:PORT, all addresses of a name, or HOST:PORT,HOST:PORT; empty: none
    nodes_cert: str = ""  # this front end's certificate for nodes,
    nodes_key: str = ""  # its key, and
    nodes_ca: str = ""  # the authority that signs nodes' certificates; all PEM files
    nodes_server_name: str = ""  # name in the nodes' certificates; empty: the host in `nodes`
    nodes_insecure: bool = False  # without the three files, reach nodes of other machines unencrypted; those of this one always may be
    nodes_local_experts: LocalExperts = "none"  # "all": this process holds all experts in memory too, and does its part of them
    nodes_layers: str = ""  # layers that are nodes' to run whole, such as 0-31: not kept in memory here; without fallback never run here
    nodes_fallback: Fallback = "file"  # experts and layers that no node holds: computed here from the model "file", or waited for ("off")
    nodes_timeout_ms: int = 2000  # a node that has not answered for so long is given up until it can be reached anew
    nodes_hedge_ms: int = 0  # after so long another holder is asked as well; 0: never
    nodes_resolve_s: float = 5.0  # seconds between two looks at what the name means
    nodes_replicas: int = 1  # of every expert, on nodes that take what they are assigned
    nodes_redeal_s: float = 10.0  # seconds that a node which vanished may take to come back to its share
    nodes_balance: Rebalance = "off"  # "auto": experts move between those nodes as the load asks for, at rebalance_interval
    nodes_slack: float = 0.25  # of an even share of the experts: so much more may a node hold when they move, or get copies

    experts_api: bool = False  # callers may have experts by themselves (Experts.Forward, Execute); steps keep outputs apart for it
    smt: bool = False  # lanes for SMT siblings too: they share a core's units, which is seldom faster
    workers_per_node: int | None = None  # worker processes; 0: compute in this process; None: planned
    threads_per_worker: int | None = None  # lanes of a worker; None: planned
    front_lane: FrontLane = "auto"  # whether this process computes while it waits: auto, on, off

    max_seqs: int = 64  # sequences of a step
    max_rows: int = 512  # tokens of a step
    max_logit_rows: int | None = None  # rows of a step with logits; None: max_seqs
    kv_memory: int | None = None  # bytes of KV cache; None: planned
    kv_format: str = "bf16"
    spin_us: int = 50  # a lane spins this long before it sleeps
    hang_ms: int = 1000  # a worker that holds a task longer is killed; 0: never

    damping: str = "off"  # of requests with neither a routing policy nor a seed: off, heat, capacity, reuse; numbers: "heat,margin=0.5"
    damping_scope: str = ""  # what it looks at together: a "sequence" or the "batch"; empty: the sequence, for reuse the batch

    prefill_seconds: float = 0.25  # what a chunk of a prompt may hold answers up that are under way; 0: no limit but max_rows
    max_queue: int = 256  # requests that may wait
    max_queue_tokens: int = 1 << 18  # prompt tokens that may wait
    default_max_tokens: int = 512  # of a request that does not say
    stream_buffer_tokens: int = 1024  # tokens a client may leave unread, and
    stream_interval_ms: float | None = None  # tokens may be held so long; None: not while few answers run, up to 50 while many do
    stream_patience: float = 5.0  # for so many seconds, before its request is called off
    max_message_bytes: int | None = None  # of a request; None: what the longest prompt can need; with experts_api 4 MiB at least
    max_rpcs: int | None = None  # calls at once, health watches included; None: max_queue + max_seqs + 1024

    drain_grace: float = 30.0  # seconds that requests may finish in after SIGTERM
    start_timeout: float = 60.0  # seconds for the workers to be ready
    lane_grace: float = 10.0  # seconds to wait for a worker to come back when nothing is left that computes
    stall_after: float = 30.0  # seconds without a finished step before the server calls itself not serving

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        self._check_nodes()
        _ = self.default_damping
        if self.max_rows < self.max_seqs:
            raise ConfigError(f"max_rows is {self.max_rows}, less than max_seqs {self.max_seqs}: every sequence of a step needs a row")
        if self.logit_rows < self.max_seqs or self.logit_rows > self.max_rows:
            between = f"between max_seqs {self.max_seqs} and max_rows {self.max_rows}"
            raise ConfigError(f"max_logit_rows is {self.logit_rows}: it must lie {between}")
        if self.workers_per_node == 0 and self.front_lane == "off":
            raise ConfigError("workers_per_node is 0 and front_lane is off: nothing would compute")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """From the environment; keywords that are not None win. Raises ConfigError."""
        config = cls(**read_settings(cls, environ, overrides))
        others = [field for field in fields(cls) if field.name.startswith("nodes_") and getattr(config, field.name) != field.default]
        if others and not config.nodes and overrides.get("nodes") is None:  # nodes="" turns the environment's off
            names = ", ".join(field.name for field in others)
            raise ConfigError(f"{names}: only for nodes, and nodes is not set: say where they are, or leave this out")
        return config

    def with_(self, **changes: Any) -> Self:
        """The same with some settings changed, checked again."""
        return replace(self, **changes)

    @property
    def logit_rows(self) -> int:
        """max_logit_rows, planned if not set."""
        return self.max_seqs if self.max_logit_rows is None else self.max_logit_rows

    @property
    def rpcs(self) -> int:
        """max_rpcs, planned if not set."""
        return self.max_queue + self.max_seqs + 1024 if self.max_rpcs is None else self.max_rpcs

    @property
    def default_damping(self) -> Damping | None:
        """damping and damping_scope in one. Raises ConfigError."""
        try:
            return parse_damping(self.damping, scope=self.damping_scope)
        except DampingError as error:
            setting = "damping_scope" if error.name == "scope" else "damping" if error.name == "damping" else f"damping: {error.name}"
            raise ConfigError(f"{setting} {error.sentence}") from error

    @property
    def layers_elsewhere(self) -> tuple[Range, ...]:
        """nodes_layers. Raises ConfigError."""
        try:
            return parse_ranges(self.nodes_layers) if self.nodes_layers else ()
        except ValueError as error:
            raise ConfigError(f"nodes_layers is {self.nodes_layers!r}: {error}") from error

    @property
    def address(self) -> str:
        """What to listen on, as gRPC writes it."""
        if self.unix_socket:
            return f"unix:{self.unix_socket}"
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return f"{host}:{self.port}"

    def _check_numbers(self) -> None:
        check_ranges(self, _RANGES)

    def _check_choices(self) -> None:
        choices = {"load": get_args(Load), "placement": get_args(Placement), "front_lane": get_args(FrontLane)}
        choices |= {"kv_format": tuple(KV_FORMATS), "rebalance": get_args(Rebalance), "nodes_balance": get_args(Rebalance)}
        choices |= {"nodes_local_experts": get_args(LocalExperts), "nodes_fallback": get_args(Fallback)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(allowed)}")
        if not self.host and not self.unix_socket:
            raise ConfigError("host is empty: give an address such as 127.0.0.1 or 0.0.0.0")
        files = {name: getattr(self, name) for name in ("operator_cert", "operator_key", "operator_ca")}
        missing = [name for name, value in files.items() if not value]
        if self.operator_address and missing:
            raise ConfigError(f"operator_address is set without {', '.join(missing)}: over TCP operators need mutual TLS")
        port = self.operator_address.rpartition(":")[2]
        if self.operator_address and not (port.isdecimal() and int(port) <= _RANGES["port"][1]):
            raise ConfigError(f"operator_address is {self.operator_address!r}: it must be HOST:PORT")
        if not self.operator_address and len(missing) < len(files):
            raise ConfigError("operator_cert, operator_key and operator_ca are for operator_address, which is not set")

    def _check_nodes(self) -> None:
        files = {name: getattr(self, name) for name in ("nodes_cert", "nodes_key", "nodes_ca")}
        missing = [name for name, value in files.items() if not value]
        if missing and len(missing) < len(files):
            raise ConfigError(f"{', '.join(missing)} must be set too: nodes are reached by mutual TLS with all three files, or with none")
        self._check_layers()
        if not self.nodes:
            if not missing:
                raise ConfigError("nodes_cert, nodes_key and nodes_ca are for nodes, which is not set")
            return
        try:
            places, _ = parse_places(self.nodes)
        except AddressError as error:
            raise ConfigError(f"nodes: {error}") from error
        abroad = [self.nodes] if file_of(self.nodes) else [str(place) for place in places if not place.local]
        if missing and abroad and not self.nodes_insecure:
            remedy = "set nodes_cert, nodes_key and nodes_ca, or nodes_insecure=on where the network lets nobody else in"
            where = "nodes in a file may be on other machines, and those" if file_of(self.nodes) else "nodes on other machines"
            raise ConfigError(f"{where} ({', '.join(abroad)}) are reached by mutual TLS: {remedy}")

    def _check_layers(self) -> None:
        if not self.layers_elsewhere:
            return
        others = {"nodes_local_experts": self.nodes_local_experts == "all", "damping": self.default_damping is not None}
        if not self.nodes:
            raise ConfigError("nodes_layers is for nodes, which is not set")
        if wrong := [name for name, is_set in others.items() if is_set]:
            raise ConfigError(f"nodes_layers leaves layers to nodes, which {wrong[0]} does not go with: leave one of them out")


_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "metrics_port": (0, 65535),
    "workers_per_node": (0, 255),
    "threads_per_worker": (1, 255),
    "max_seqs": (1, 4096),
    "max_rows": (1, 65536),
    "max_logit_rows": (1, 65536),
    "kv_memory": (1, 1 << 48),
    "rebalance_interval": (1.0, 86400.0),
    "rebalance_replicas": (0, 1024),
    "nodes_timeout_ms": (10, 3_600_000),
    "nodes_hedge_ms": (0, 3_600_000),
    "nodes_resolve_s": (0.1, 86400.0),
    "nodes_replicas": (1, 64),
    "nodes_redeal_s": (0.0, 86400.0),
    "nodes_slack": (0.0, 64.0),
    "spin_us": (0, 1_000_000),
    "hang_ms": (0, 3_600_000),
    "max_queue": (1, 1_000_000),
    "max_queue_tokens": (1, 1 << 40),
    "default_max_tokens": (1, 1 << 30),
    "stream_buffer_tokens": (16, 1 << 20),
    "stream_interval_ms": (0.0, 1000.0),
    "stream_patience": (0.0, 3600.0),
    "max_message_bytes": (1 << 16, 1 << 30),
    "max_rpcs": (1, 1_000_000),
    "prefill_seconds": (0.0, 3600.0),
    "drain_grace": (0.0, 86400.0),
    "start_timeout": (0.1, 86400.0),
    "lane_grace": (0.0, 3600.0),
    "stall_after": (0.1, 86400.0),
}


def check_ranges(settings: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuses numbers that do not lie between two others; None, and nothing else, lies anywhere. Raises ConfigError."""
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name} is {value}: it must lie between {low} and {high}")


def read_settings(kind: type, environ: Mapping[str, str] | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a dataclass from the environment; overrides that are not None win. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for field in fields(kind):
        raw = environ.get(_PREFIX + field.name.upper())
        if raw:
            values[field.name] = _parse(_PREFIX + field.name.upper(), raw, _PARSERS.get(str(field.type).removesuffix(" | None"), str))
    unknown = set(overrides) - {field.name for field in fields(kind)}
    if unknown:
        raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}")
    return values | {name: value for name, value in overrides.items() if value is not None}


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where converted models are kept: COLIBRI_CACHE, else colibri in XDG_CACHE_HOME, else ~/.cache/colibri."""
    environ = os.environ if environ is None else environ
    if own := environ.get(_PREFIX + "CACHE"):
        return _own_folder("CACHE", own)
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "colibri"


def _own_folder(variable: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{_PREFIX}{variable} is {text!r}: there is no such user; name a folder") from error


def runtime_dirs(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Folders for the operators' sockets of this user's servers, the first being where new ones go: COLIBRI_RUNTIME alone, else two."""
    environ = os.environ if environ is None else environ
    if own := environ.get(_PREFIX + "RUNTIME"):
        return (_own_folder("RUNTIME", own),)
    shared = Path(f"/tmp/colibri-{os.getuid()}")
    session = environ.get("XDG_RUNTIME_DIR")
    return (Path(session) / "colibri", shared) if session else (shared,)


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """COLIBRI_* variables that mean nothing, with the one that may have been meant or "". Kubernetes' own are not among them."""
    environ = os.environ if environ is None else environ
    known = [*(field.name.upper() for field in fields(ServeConfig)), *_OTHERS]
    names = [name.removeprefix(_PREFIX) for name, value in environ.items() if name.startswith(_PREFIX) and not _of_kubernetes(name, value)]
    guesses = {name: get_close_matches(name, known, n=1, cutoff=0.6) for name in sorted(names) if name not in known}
    return {_PREFIX + name: _PREFIX + guess[0] if guess else "" for name, guess in guesses.items()}


def _of_kubernetes(name: str, value: str) -> bool:
    return _KUBERNETES.fullmatch(f"{name}={value}") is not None


def parse_bytes(text: str) -> int:
    """'4096', '512M', '2GiB' as bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError("a size such as 512M or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _parse_switch(text: str) -> bool:
    """1, true, yes, on and their opposites. Raises ValueError."""
    word = text.strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError("on or off")
    return word in ("1", "true", "yes", "on")


_PARSERS: dict[str, Callable[[str], object]] = {"int": parse_bytes, "bool": _parse_switch, "float": float, "Path": Path, "str": str}


def _parse(variable: str, raw: str, parser: Callable[[str], object]) -> object:
    try:
        return parser(raw)
    except ValueError as error:
        raise ConfigError(f"{variable} is {raw!r}: it must be a number") from error
