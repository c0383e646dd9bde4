"""Family tables: descriptors/*.json say, as data, where a family keeps its settings and tensors and what it must not ask for.

A table (docs/models.md lists those shipped; `--descriptor FILE` takes another) is a JSON object:
  family, model_types  a name for people; config.json's model_type values ("gguf:<architecture>" for GGUF) it serves
  scalars   container scalar -> {"keys": [settings, first found wins], "default": number, another scalar or "a/b"} | {"value": number}
            | {"rows_of": role}. A setting that is null counts as not found; without "default" that is an error. A dotted key looks
            into objects.
  require   [{"key", "values"}]: a setting with any other value (null stands for "not there") is refused by name
  rope      style "half" or "interleaved"; theta: keys; scaling: keys of a rope_scaling object; dims: keys (optional, else head_dim);
            factors: a tensor that divides the frequencies (optional)
  router    the fields of docs/container.md's router but k; what is left out is the plainest. A value may be {"key": setting, and for each
            value of it the result: "true": ..., "sigmoid": ..., "null": if it is not there} or, for numbers, {"keys": [settings],
            "default": number}
  tied_head a setting's key, or "absent": the head is the embedding if there is no head tensor
  tensors   role -> tensor spec or a list of alternatives. A spec is a name with {layer} and {expert}, or an object: name; "stacked":
            the first axis is the expert; "half": "first" | "second" half of the rows (fused gate/up); "unpermute": "heads" | "kv_heads",
            whose rows GGUF has interleaved; "times": "rsqrt_hidden", for what is to be multiplied by 1 / sqrt(hidden)
  ignore    patterns of tensors that may be left over; any other left-over tensor is an error"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ops.container_layout import Json
from ops.convert.errors import ConvertError

TABLES = Path(__file__).parent / "descriptors"
SCALARS = (
    "vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "experts", "top_k", "max_context", "sliding_window", "norm_eps",
)  # fmt: skip
REQUIRED_ROLES = ("embed", "final_norm", "attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down")
ROUTER_VECTORS = ("router_bias", "router_select_bias", "router_expert_scale", "router_input_scale")
OPTIONAL_ROLES = ("head", "router", *ROUTER_VECTORS, "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")

# Families people ask for whose blocks the engine does not have yet, and why.
UNSUPPORTED = {
    "qwen2_moe": "it has a shared expert beside the routed ones",
    "olmoe": "it normalises queries and keys over the whole projection",
    "deepseek_v2": "it has latent attention and shared experts",
    "deepseek_v3": "it has latent attention and shared experts",
    "gpt_oss": "it has attention sinks, biased experts and MXFP4 weights",
    "phimoe": "it normalises with a bias and has rotary factors of two lengths",
    "glm4_moe": "it has a shared expert beside the routed ones and dense first layers",
    "ernie4_5_moe": "it has shared experts beside the routed ones",
    "lfm2_moe": "it has short convolutions",
    "minimax_m2": "it normalises queries and keys over the whole projection",
    "llama4": "it has a shared expert beside the routed ones and chunked attention",
    "gemma4": "it has a dense branch beside the experts and attention of two kinds",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where a role's tensor is: see "tensors" above."""

    name: str
    stacked: bool = False
    half: str = ""
    unpermute: str = ""
    times: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A family table, checked."""

    origin: str
    family: str
    model_types: tuple[str, ...]
    scalars: Mapping[str, Mapping[str, Json]]
    require: tuple[tuple[str, tuple[Json, ...]], ...]
    rope: Mapping[str, Json]
    router: Mapping[str, Json]
    tied_head: str
    tensors: Mapping[str, tuple[TensorSpec, ...]]
    ignore: tuple[str, ...]


def shipped_tables() -> Iterator[Table]:
    """All tables that come with the program, by file name."""
    for path in sorted(TABLES.glob("*.json")):
        yield read_table(path)


def table_for(family: str, override: Path | None = None) -> Table:
    """The user's table if he gives one, else the shipped one that serves `family`."""
    if override is not None:
        return read_table(override)
    known: list[str] = []
    for table in shipped_tables():
        if family in table.model_types:
            return table
        known += table.model_types
    why = f": {UNSUPPORTED[family]}" if family in UNSUPPORTED else ""
    raise ConvertError(
        f"model family {family!r} is not supported{why}. Supported: {', '.join(known)}. "
        "A model made of the same blocks can be converted with a table of its own: --descriptor FILE"
    )


def read_table(path: Path) -> Table:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConvertError(f"{path}: cannot be read as a family table: {reason}") from error
    if not isinstance(raw, dict):
        raise ConvertError(f"{path}: a family table is a JSON object")
    return Table(
        origin=str(path),
        family=str(raw.get("family", path.stem)),
        model_types=tuple(str(name) for name in _list(path, raw, "model_types")),
        scalars=_scalars(path, _object(path, raw, "scalars")),
        require=tuple(_requirement(path, row) for row in _list(path, raw, "require")),
        rope=_object(path, raw, "rope"),
        router=_object(path, raw, "router"),
        tied_head=str(raw.get("tied_head", "absent")),
        tensors=_tensors(path, _object(path, raw, "tensors")),
        ignore=tuple(str(pattern) for pattern in _list(path, raw, "ignore")),
    )


def setting(config: Mapping[str, Json], key: str) -> Json:
    """A setting by its key, dotted keys looking into objects; None if it is not there or null."""
    if key in config:
        return config[key]
    head, _, rest = key.partition(".")
    inner = config.get(head)
    return setting(inner, rest) if rest and isinstance(inner, dict) else None


def _object(path: Path, raw: Mapping[str, Json], key: str) -> Mapping[str, Json]:
    value = raw.get(key)
    if not isinstance(value, dict):
        raise ConvertError(f"{path}: {key} is missing or no object")
    return value


def _list(path: Path, raw: Mapping[str, Json], key: str) -> list[Json]:
    value = raw.get(key, [])
    if not isinstance(value, list):
        raise ConvertError(f"{path}: {key} is no list")
    return value


def _scalars(path: Path, raw: Mapping[str, Json]) -> Mapping[str, Mapping[str, Json]]:
    for name in SCALARS:
        rule = raw.get(name)
        if not isinstance(rule, dict) or not rule.keys() & {"keys", "value", "rows_of"}:
            raise ConvertError(f"{path}: scalars.{name} must say keys, value or rows_of")
    return {name: _object(path, raw, name) for name in SCALARS}


def _requirement(path: Path, row: Json) -> tuple[str, tuple[Json, ...]]:
    if not isinstance(row, dict) or not isinstance(row.get("key"), str) or not isinstance(row.get("values"), list):
        raise ConvertError(f"{path}: a requirement is an object of key and values, not {row!r}")
    return str(row["key"]), tuple(_list(path, row, "values"))


def _tensors(path: Path, raw: Mapping[str, Json]) -> Mapping[str, tuple[TensorSpec, ...]]:
    for role in raw:
        if role not in REQUIRED_ROLES + OPTIONAL_ROLES:
            raise ConvertError(f"{path}: tensors.{role} is no role; roles are {', '.join(REQUIRED_ROLES + OPTIONAL_ROLES)}")
    for role in REQUIRED_ROLES:
        if role not in raw:
            raise ConvertError(f"{path}: tensors.{role} is missing")
    return {role: tuple(_spec(path, role, spec) for spec in (specs if isinstance(specs, list) else [specs])) for role, specs in raw.items()}


def _spec(path: Path, role: str, raw: Json) -> TensorSpec:
    if isinstance(raw, str):
        return TensorSpec(raw)
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        raise ConvertError(f"{path}: tensors.{role} is neither a name nor an object with one")
    half, unpermute, times = (str(raw.get(key, "")) for key in ("half", "unpermute", "times"))
    if times not in ("", "rsqrt_hidden"):
        raise ConvertError(f"{path}: tensors.{role}: times is rsqrt_hidden, not {times!r}")
    if half not in ("", "first", "second") or unpermute not in ("", "heads", "kv_heads"):
        raise ConvertError(f"{path}: tensors.{role}: half is first or second, unpermute heads or kv_heads")
    return TensorSpec(str(raw["name"]), bool(raw.get("stacked", False)), half, unpermute, times)
