"""From a table's router rules and a checkpoint's settings to the container's router object (docs/container.md, "Router")."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields

from engine_c import EngineError, Router, route_logits
from ops.container_layout import Json
from ops.convert.errors import ConvertError
from ops.convert.families import Table, setting
from ops.convert.source import Source

PLAIN: Mapping[str, Json] = {"score": "softmax_all", "weight": "softmax_chosen", "renorm": "none", "scale": 1.0, "apply_at": "output"}
_KEYS = tuple(field.name for field in fields(Router) if field.name not in ("experts", "k"))


def resolve_router(table: Table, source: Source, *, experts: int, top_k: int) -> dict[str, Json]:
    """What the table says of a router, with the source's settings. A router the engine would not run is an error that names the field."""
    for key in table.router:
        if key not in _KEYS:
            raise ConvertError(f"{table.origin}: router.{key} is no part of a router; those are {', '.join(_KEYS)}")
    router = {**PLAIN, **{key: _value(table, source, key, rule) for key, rule in table.router.items()}}
    router = {key: value for key, value in router.items() if value is not None}
    if ("router_input_scale" in table.tensors) != (router.get("input") == "residual"):
        raise ConvertError(f"{table.origin}: router.input is residual if and only if tensors.router_input_scale is there")
    if experts > 1:
        _check(table, source, {**router, "k": top_k}, experts)
    return router


def _check(table: Table, source: Source, router: Mapping[str, Json], experts: int) -> None:
    """By asking the engine."""
    try:
        route_logits(Router.from_json(router, experts=experts), [[0.0] * experts])
    except (ValueError, TypeError, EngineError) as error:
        raise ConvertError(f"{source.path}: the engine has no such router: {error} (from {table.origin})") from error


def _value(table: Table, source: Source, key: str, rule: Json) -> Json:
    if not isinstance(rule, dict):
        return rule
    if isinstance(rule.get("keys"), list):
        return _number(table, source, key, rule)
    if not isinstance(rule.get("key"), str):
        raise ConvertError(f"{table.origin}: router.{key} is neither a value nor an object of a key and results or of keys and a default")
    value = setting(source.config, str(rule["key"]))
    name = value if isinstance(value, str) else json.dumps(value)
    if name in rule and name != "key":
        return rule[name]
    if value is None:
        raise ConvertError(f"{source.path}: the setting {rule['key']} is missing (the router's {key} depends on it)")
    known = ", ".join(choice for choice in rule if choice != "key")
    raise ConvertError(f"{source.path}: {rule['key']} is {value!r}, which the engine does not support (it does: {known})")


def _number(table: Table, source: Source, key: str, rule: Mapping[str, Json]) -> Json:
    names = [str(name) for name in rule["keys"]] if isinstance(rule["keys"], list) else []
    for name in names:
        value = setting(source.config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConvertError(f"{source.path}: {name} is {value!r}, wanted a number")
        return value
    if "default" in rule:
        return rule["default"]
    raise ConvertError(f"{source.path}: the setting {' or '.join(names)} is missing (the router's {key} comes from it)")
