"""From a checkpoint's settings to the container's scalars and router descriptor. Nothing is assumed that the settings do not say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ops.container_layout import Json
from ops.convert.errors import ConvertError
from ops.convert.families import Table, setting
from ops.convert.rope import Rotary, rotary
from ops.convert.router import resolve_router
from ops.convert.source import Source

_MAX_SCALAR = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Arch:
    """A model's scalars, docs/container.md's names."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    experts: int
    top_k: int
    max_context: int
    sliding_window: int
    norm_eps: float
    rope_style: str
    rope: Rotary
    router: Mapping[str, Json]
    tied: bool

    def to_json(self) -> dict[str, Json]:
        return {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "ffn": self.ffn,
            "experts": self.experts,
            "max_context": self.max_context,
            "sliding_window": self.sliding_window,
            "norm_eps": self.norm_eps,
            "attention_scale": 1.0 / math.sqrt(self.head_dim),
            "activation": "silu",
            "rope": {"style": self.rope_style, "dims": 2 * len(self.rope.inv_freq), "scale": self.rope.scale},
        }

    def router_json(self) -> dict[str, Json]:
        return {**self.router, "k": self.top_k}


def resolve(table: Table, source: Source) -> Arch:
    """Reads every scalar from the source's settings; a missing or unsupported one is an error that names it."""
    for key, values in table.require:
        value = setting(source.config, key)
        if not any(value is allowed if isinstance(allowed, bool) or allowed is None else value == allowed for allowed in values):
            raise ConvertError(f"{source.path}: {key} is {value!r}, which the engine does not support (it does: {_choices(values)})")
    scalars = _Scalars(table, source)
    counts = {name: scalars.count(name) for name in scalars.names if name != "norm_eps"}
    if counts["top_k"] > counts["experts"] or counts["heads"] % counts["kv_heads"]:
        raise ConvertError(
            f"{source.path}: {counts['top_k']} of {counts['experts']} experts, {counts['heads']} heads of {counts['kv_heads']} groups: "
            "the settings contradict each other"
        )
    return Arch(
        **counts,
        norm_eps=scalars.number("norm_eps"),
        rope_style=str(table.rope.get("style", "half")),
        rope=rotary(table, source, counts["head_dim"], counts["max_context"]),
        router=resolve_router(table, source, experts=counts["experts"], top_k=counts["top_k"]),
        tied=_tied(table, source),
    )


class _Scalars:
    """Evaluates a table's scalar rules."""

    def __init__(self, table: Table, source: Source) -> None:
        self._table, self._source = table, source
        self.names = tuple(table.scalars)

    def count(self, name: str) -> int:
        value = self.number(name)
        low = 0 if name == "sliding_window" else 1
        if value != int(value) or not low <= value <= _MAX_SCALAR:
            raise ConvertError(f"{self._source.path}: {name} is {value:g}, wanted a whole number from {low}")
        return int(value)

    def number(self, name: str) -> float:
        rule = self._table.scalars[name]
        if "rows_of" in rule:
            return float(self._rows_of(str(rule["rows_of"])))
        if "value" in rule:
            return _number(self._table.origin, name, rule["value"])
        keys = rule["keys"] if isinstance(rule["keys"], list) else [rule["keys"]]
        for key in keys:
            value = setting(self._source.config, str(key))
            if value is not None:
                number = _number(str(self._source.path), str(key), value)
                return max(number, 1.0) if name == "experts" else number  # GGUF writes 0 experts for a dense model
        if "default" in rule:
            return self._default(name, rule["default"])
        raise ConvertError(f"{self._source.path}: the setting {' or '.join(map(str, keys))} is missing ({name} comes from it)")

    def _default(self, name: str, default: Json) -> float:
        if not isinstance(default, str):
            return _number(self._table.origin, name, default)
        above, _, below = default.partition("/")
        value = self.number(above)
        if not below:
            return value
        divisor = self.number(below)
        if not divisor or value % divisor:
            raise ConvertError(f"{self._source.path}: {name} is not said, and {above} {value:g} is no multiple of {below} {divisor:g}")
        return value / divisor

    def _rows_of(self, role: str) -> int:
        for spec in self._table.tensors.get(role, ()):
            if spec.name in self._source.shapes:
                return self._source.shapes[spec.name][0]
        raise ConvertError(f"{self._source.path}: tensor {self._table.tensors[role][0].name} is missing")


def _number(where: str, key: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConvertError(f"{where}: {key} is {value!r}, wanted a number")
    return float(value)


def _tied(table: Table, source: Source) -> bool:
    """Whether the head is the embedding. A head that is missing without the settings saying so is an error, found with the tensors."""
    if table.tied_head == "absent":
        return not any(spec.name in source.shapes for spec in table.tensors.get("head", ()))
    return setting(source.config, table.tied_head) is True


def _choices(values: tuple[Json, ...]) -> str:
    return ", ".join("not set" if value is None else repr(value) for value in values)
