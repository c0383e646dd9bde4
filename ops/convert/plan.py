"""What a conversion writes, before anything is read: container tensors in file order, each with how to get its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ops.container_layout import TensorEntry
from ops.convert.arch import Arch
from ops.convert.errors import ConvertError
from ops.convert.families import ROUTER_VECTORS, Table, TensorSpec
from ops.convert.source import Source

F32: TypeAlias = NDArray[np.float32]
Rows: TypeAlias = Callable[[int, int], F32]
"""Rows start..stop-1 of a matrix or vector."""
Expert: TypeAlias = Callable[[], tuple[F32, F32, F32]]
"""gate, up [ffn, hidden] and down [hidden, ffn] of an expert."""

# Format of the linears and experts, format of embedding and head. Norms, router and rotary frequencies are always plain f32.
QUANT_FORMATS = {"f32": ("f32", "f32"), "bf16": ("bf16", "bf16"), "int8": ("int8", "int8"), "int4": ("int4", "int8")}


@dataclass(frozen=True, slots=True)
class Formats:
    """What the matrices of a container are stored as."""

    linear: str
    head: str
    """the head, and with it an embedding that is tied to it"""
    own_embed: str
    """an embedding that is not the head: a token reads one row of it, so a smaller format would save nothing but room"""

    def embed(self, *, tied: bool) -> str:
        return self.head if tied else self.own_embed


def formats_of(quant: str, head: str | None = None) -> Formats:
    """The formats of a container of `quant` whose head is `head`, or what `quant` says if None. Raises ConvertError for an unknown one."""
    for what, name in (("weight format", quant), ("head's format", head)):
        if name is not None and name not in QUANT_FORMATS:
            raise ConvertError(f"the {what} {name!r} is unknown; it is one of {', '.join(QUANT_FORMATS)}")
    linear, usual = QUANT_FORMATS[quant]
    return Formats(linear, head or usual, usual)


@dataclass(frozen=True, slots=True)
class Job:
    """One container tensor: `rows` for layouts plain and p32, `expert` for layout expert."""

    entry: TensorEntry
    rows: Rows | None = None
    expert: Expert | None = None
    origin: str = ""
    """file and tensors it is read from, for messages"""


@dataclass(frozen=True, slots=True)
class Plan:
    arch: Arch
    jobs: tuple[Job, ...]


def build_plan(source: Source, table: Table, arch: Arch, formats: Formats) -> Plan:
    """Finds every tensor and checks its shape. A missing tensor, a wrong shape or a left-over tensor is an error that names it."""
    planner = _Planner(source, table, arch, formats)
    jobs = [*planner.model_jobs()]
    for layer in range(arch.layers):
        jobs += planner.layer_jobs(layer)
    for layer in range(arch.layers):
        jobs += [planner.expert_job(layer, expert) for expert in range(arch.experts)]
    planner.check_left_over()
    return Plan(arch, tuple(jobs))


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the source, or the part of one, that plays a role."""

    name: str
    count: int
    """rows"""
    rows: Rows


class _Planner:
    def __init__(self, source: Source, table: Table, arch: Arch, formats: Formats) -> None:
        self._source, self._table, self._arch = source, table, arch
        self._formats, self._linear = formats, formats.linear
        self._used: set[str] = {str(table.rope.get("factors", ""))}

    def model_jobs(self) -> list[Job]:
        arch = self._arch
        inv_freq = arch.rope.inv_freq
        jobs = [
            self._packed("embed", self._formats.embed(tied=arch.tied), arch.hidden, self._part("embed", (arch.vocab, arch.hidden))),
            self._plain("final_norm", self._part("final_norm", (arch.hidden,))),
            Job(TensorEntry("rope.inv_freq", "plain", "f32", inv_freq.shape), rows=lambda start, stop: inv_freq[start:stop]),
        ]
        if arch.tied:
            self._used.update(spec.name for spec in self._table.tensors.get("head", ()))
        else:
            jobs.insert(1, self._packed("head", self._formats.head, arch.hidden, self._part("head", (arch.vocab, arch.hidden))))
        return jobs

    def layer_jobs(self, layer: int) -> list[Job]:
        arch, prefix = self._arch, f"layers.{layer}"
        q_rows, kv_rows = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        qkv = [self._part(role, (rows, arch.hidden), layer) for role, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))]
        jobs = [
            self._plain(f"{prefix}.attn_norm", self._part("attn_norm", (arch.hidden,), layer)),
            self._packed(f"{prefix}.qkv", self._linear, arch.hidden, *qkv),
            self._packed(f"{prefix}.o", self._linear, q_rows, self._part("o", (arch.hidden, q_rows), layer)),
            self._plain(f"{prefix}.ffn_norm", self._part("ffn_norm", (arch.hidden,), layer)),
        ]
        for role in ("q_norm", "k_norm"):
            if self._has(role):
                jobs.append(self._plain(f"{prefix}.{role}", self._part(role, (arch.head_dim,), layer)))
        if self._has("q_bias"):
            biases = [self._part(role, (rows,), layer) for role, rows in (("q_bias", q_rows), ("k_bias", kv_rows), ("v_bias", kv_rows))]
            jobs.append(self._plain(f"{prefix}.qkv_bias", *biases))
        return jobs + self._router_jobs(layer)

    def expert_job(self, layer: int, expert: int) -> Job:
        arch = self._arch
        gate, up = (self._part(role, (arch.ffn, arch.hidden), layer, expert) for role in ("gate", "up"))
        down = self._part("down", (arch.hidden, arch.ffn), layer, expert)

        def load() -> tuple[F32, F32, F32]:
            return gate.rows(0, arch.ffn), up.rows(0, arch.ffn), down.rows(0, arch.hidden)

        entry = TensorEntry(f"layers.{layer}.experts.{expert}", "expert", self._linear, (arch.ffn, arch.hidden))
        return Job(entry, expert=load, origin=self._origin((gate, up, down)))

    def check_left_over(self) -> None:
        """A tensor nobody reads is a feature the engine would leave out, so the results would be wrong."""
        left = [name for name in self._source.shapes if name not in self._used]
        left = [name for name in left if not any(fnmatchcase(name, pattern) for pattern in self._table.ignore)]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ConvertError(
                f"{self._source.where(left[0])}: tensor {', '.join(sorted(left)[:3])}{more}: nothing in {self._table.origin} uses it; "
                "the model has a part that is not supported, or the table must name or ignore it"
            )

    def _router_jobs(self, layer: int) -> list[Job]:
        arch, prefix = self._arch, f"layers.{layer}"
        if arch.experts == 1:  # one expert has weight 1 whatever its router says
            for role in ("router", *ROUTER_VECTORS):
                self._used.update(spec.name.format(layer=layer) for spec in self._table.tensors.get(role, ()))
            return []
        jobs = [self._plain(f"{prefix}.router", self._part("router", (arch.experts, arch.hidden), layer))]
        for role in ROUTER_VECTORS:
            size = arch.hidden if role == "router_input_scale" else arch.experts
            if self._has(role):
                jobs.append(self._plain(f"{prefix}.{role}", self._part(role, (size,), layer)))
        return jobs

    def _has(self, role: str) -> bool:
        return role in self._table.tensors

    def _plain(self, name: str, *parts: _Part) -> Job:
        columns = self._source.shapes[parts[0].name][1:]
        shape = (sum(part.count for part in parts), *columns)
        return Job(TensorEntry(name, "plain", "f32", shape), rows=_joined(parts), origin=self._origin(parts))

    def _packed(self, name: str, fmt: str, columns: int, *parts: _Part) -> Job:
        shape = (sum(part.count for part in parts), columns)
        return Job(TensorEntry(name, "p32", fmt, shape), rows=_joined(parts), origin=self._origin(parts))

    def _origin(self, parts: Sequence[_Part]) -> str:
        return f"{self._source.where(parts[0].name)}: tensor {', '.join(part.name for part in parts)}"

    def _part(self, role: str, shape: tuple[int, ...], layer: int = 0, expert: int = 0) -> _Part:
        """How to read a role's tensor, after finding it and checking that its shape gives `shape`."""
        spec, name = self._find(role, layer, expert)
        self._used.add(name)
        stored = ((self._arch.experts,) if spec.stacked else ()) + ((2 * shape[0], *shape[1:]) if spec.half else shape)
        if self._source.shapes[name] != stored:
            raise ConvertError(
                f"{self._source.where(name)}: tensor {name} has shape {list(self._source.shapes[name])}, the settings want {list(stored)}"
            )
        rows = self._stacked(name, expert) if spec.stacked else self._whole(name)
        if spec.half:
            rows = _shifted(rows, shape[0] if spec.half == "second" else 0)
        if spec.unpermute:
            rows = _unpermuted(rows, shape[0] // (self._arch.heads if spec.unpermute == "heads" else self._arch.kv_heads))
        if spec.times:
            rows = _times(rows, 1 / math.sqrt(self._arch.hidden))
        return _Part(name, shape[0], rows)

    def _find(self, role: str, layer: int, expert: int) -> tuple[TensorSpec, str]:
        specs = self._table.tensors.get(role, ())
        names = [spec.name.format(layer=layer, expert=expert) for spec in specs]
        for spec, name in zip(specs, names, strict=True):
            if name in self._source.shapes:
                return spec, name
        if not names:
            raise ConvertError(f"{self._table.origin}: the model needs a {role} tensor, the table names none")
        raise ConvertError(f"{self._source.path}: tensor {' or '.join(names)} is missing")

    def _whole(self, name: str) -> Rows:
        source = self._source
        return lambda start, stop: source.rows(name, start, stop)

    def _stacked(self, name: str, expert: int) -> Rows:
        source = self._source

        def rows(start: int, stop: int) -> F32:
            matrix: F32 = source.rows(name, expert, expert + 1)[0]
            return matrix[start:stop]

        return rows


def _joined(parts: Sequence[_Part]) -> Rows:
    """Parts one below the other."""
    if len(parts) == 1:
        return parts[0].rows

    def rows(start: int, stop: int) -> F32:
        pieces, first = [], 0
        for part in parts:
            low, high = max(start - first, 0), min(stop - first, part.count)
            if low < high:
                pieces.append(part.rows(low, high))
            first += part.count
        return np.concatenate(pieces)

    return rows


def _shifted(rows: Rows, by: int) -> Rows:
    return lambda start, stop: rows(start + by, stop + by)


def _times(rows: Rows, factor: float) -> Rows:
    return lambda start, stop: rows(start, stop) * np.float32(factor)


def _unpermuted(rows: Rows, head_rows: int) -> Rows:
    """Undoes GGUF's row order of query and key heads, which pairs rotary dimensions i and i + n/2 next to each other."""

    def unpermuted(start: int, stop: int) -> F32:
        low, high = start // head_rows * head_rows, -(-stop // head_rows) * head_rows
        stored = rows(low, high)
        heads = stored.reshape(-1, head_rows // 2, 2, *stored.shape[1:]).swapaxes(1, 2)
        result: F32 = heads.reshape(stored.shape)[start - low : stop - low]
        return result

    return unpermuted
