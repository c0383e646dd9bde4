"""Routing policies in messages."""

from __future__ import annotations

from colibri.v1 import experts_pb2, inference_pb2 as pb
from engine_c import Damping
from engine_c.structs import ModelInfo
from service.damping import NUMBERS, OFF, DampingError, make_damping
from service.faults import InvalidField

_KINDS: dict[int, str] = {
    pb.RoutingPolicy.DAMPING_OFF: OFF,
    pb.RoutingPolicy.DAMPING_HEAT: "heat",
    pb.RoutingPolicy.DAMPING_CAPACITY: "capacity",
    pb.RoutingPolicy.DAMPING_REUSE: "reuse",
}
_SCOPES: dict[int, str] = {
    pb.RoutingPolicy.SCOPE_UNSPECIFIED: "",
    pb.RoutingPolicy.SCOPE_SEQUENCE: "sequence",
    pb.RoutingPolicy.SCOPE_BATCH: "batch",
}
HasRouting = pb.GenerateRequest | pb.ScoreRequest | experts_pb2.RouteRequest


def choose_damping(message: HasRouting, *, info: ModelInfo, default: Damping | None = None, seeded: bool = False) -> Damping | None:
    """How a request is to be routed; None: by the router alone. Raises InvalidField.

    Whoever names a seed wants the same tokens again: the default, which an operator may change, is not for it, nor is what depends on
    other requests.
    """
    if not message.HasField("routing"):
        return None if seeded else default
    damping = read_policy(message.routing, field="routing", info=info)
    if damping is not None and damping.scope == "batch" and seeded:
        sentence = "is BATCH, by which tokens depend on what else runs, and the request has a seed; leave one of them out"
        raise InvalidField("routing.scope", sentence)
    return damping


def read_policy(policy: pb.RoutingPolicy, *, field: str, info: ModelInfo) -> Damping | None:
    """What a policy asks of a model; None: no damping. `field` is where it stands in its request. Raises InvalidField."""
    damping = damping_of(policy, field=field)
    if damping is not None and not info.router_layers:
        raise InvalidField(f"{field}.damping", "this model has no router, so there is nothing to damp; leave it out or set OFF")
    return damping


def damping_of(policy: pb.RoutingPolicy, *, field: str = "policy") -> Damping | None:
    """The same, whatever the model."""
    if policy.damping not in _KINDS:
        raise InvalidField(f"{field}.damping", f"is {_shown(policy, 'damping')}; it must be one of {_names(_KINDS, 'Damping')}")
    if policy.scope not in _SCOPES:
        raise InvalidField(f"{field}.scope", f"is {_shown(policy, 'scope')}; it must be one of {_names(_SCOPES, 'Scope')}")
    numbers = {name: getattr(policy, name) for name in NUMBERS if policy.HasField(name)}
    try:
        return make_damping(_KINDS[policy.damping], scope=_SCOPES[policy.scope], numbers=numbers)
    except DampingError as error:
        raise InvalidField(f"{field}.{error.name}", error.sentence) from error


def policy_message(damping: Damping | None) -> pb.RoutingPolicy:
    """The policy that asks for it, all that matters set."""
    if damping is None:
        return pb.RoutingPolicy(damping=pb.RoutingPolicy.DAMPING_OFF)
    kind = next(number for number, name in _KINDS.items() if name == damping.kind)
    scope = next(number for number, name in _SCOPES.items() if name == damping.scope)
    numbers = {name: getattr(damping, name) for name in NUMBERS}
    return pb.RoutingPolicy(damping=kind, scope=scope, **numbers)  # type: ignore[arg-type]


def _shown(policy: pb.RoutingPolicy, field: str) -> str:
    number = getattr(policy, field)
    return "missing" if number == 0 else str(number)


def _names(known: dict[int, str], kind: str) -> str:
    enum = pb.RoutingPolicy.DESCRIPTOR.enum_types_by_name[kind]
    return ", ".join(enum.values_by_number[number].name for number in known)
