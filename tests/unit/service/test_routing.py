"""Routing policies in requests: every field's bounds, what a seed excludes, whom the default is for."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from colibri.v1 import experts_pb2, inference_pb2 as pb
from engine_c import Damping
from engine_c.structs import ModelInfo
from service.damping import make_damping
from service.faults import InvalidField
from service.routing import choose_damping, policy_message, read_policy

Policy = pb.RoutingPolicy
DEFAULT = Damping("capacity", scope="batch")
ROUTED, DENSE = (
    ModelInfo(**{field.name: 1 for field in fields(ModelInfo)} | {"router_layers": layers})  # type: ignore[arg-type]
    for layers in (4, 0)
)


def choose(policy: Policy | None, *, seeded: bool = False, default: Damping | None = DEFAULT, info: ModelInfo = ROUTED) -> Damping | None:
    return choose_damping(pb.GenerateRequest(routing=policy), info=info, default=default, seeded=seeded)


def refused(policy: Policy, **how: object) -> tuple[str, str]:
    """Field and sentence."""
    with pytest.raises(InvalidField) as caught:
        choose(policy, **how)  # type: ignore[arg-type]
    return caught.value.field, caught.value.sentence


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (Policy(), "routing.damping"),
        (Policy(damping=17), "routing.damping"),  # type: ignore[arg-type]
        (Policy(scope=Policy.SCOPE_BATCH), "routing.damping"),
        (Policy(damping=Policy.DAMPING_HEAT, scope=9), "routing.scope"),  # type: ignore[arg-type]
        (Policy(damping=Policy.DAMPING_REUSE, scope=Policy.SCOPE_SEQUENCE), "routing.scope"),
        (Policy(damping=Policy.DAMPING_HEAT, threshold=1_000_001), "routing.threshold"),
        (Policy(damping=Policy.DAMPING_HEAT, growth=0.99), "routing.growth"),
        (Policy(damping=Policy.DAMPING_HEAT, growth=1001), "routing.growth"),
        (Policy(damping=Policy.DAMPING_HEAT, decay=-0.1), "routing.decay"),
        (Policy(damping=Policy.DAMPING_HEAT, decay=1.1), "routing.decay"),
        (Policy(damping=Policy.DAMPING_CAPACITY, capacity_factor=0.5), "routing.capacity_factor"),
        (Policy(damping=Policy.DAMPING_CAPACITY, capacity_factor=math.inf), "routing.capacity_factor"),
        (Policy(damping=Policy.DAMPING_REUSE, margin=-1), "routing.margin"),
        (Policy(damping=Policy.DAMPING_REUSE, margin=math.nan), "routing.margin"),
        (Policy(damping=Policy.DAMPING_HEAT, max_rerouted=1.5), "routing.max_rerouted"),
        (Policy(damping=Policy.DAMPING_HEAT, max_rerouted=math.nan), "routing.max_rerouted"),
    ],
)
def test_a_bad_field_is_named(policy: Policy, field: str) -> None:
    assert refused(policy)[0] == field


def test_a_policy_without_a_kind_is_told_what_there_is() -> None:
    assert refused(Policy(margin=1))[1].startswith("is missing; it must be one of DAMPING_OFF, DAMPING_HEAT")


@pytest.mark.parametrize("kind", ["heat", "capacity", "reuse"])
@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_a_message_says_all_there_is_to_say(kind: str, scope: str) -> None:
    if (kind, scope) == ("reuse", "sequence"):
        scope = "batch"
    numbers = {"threshold": 7, "growth": 1.5, "decay": 0.25, "capacity_factor": 1.125, "margin": 0.5, "max_rerouted": 0.75}
    damping = Damping(kind, scope=scope, **numbers)  # type: ignore[arg-type]
    assert choose(policy_message(damping)) == damping


def test_no_damping_is_a_policy_of_its_own() -> None:
    assert choose(policy_message(None)) is None
    assert choose(Policy(damping=Policy.DAMPING_OFF, margin=-1)) is None, "its numbers are without effect"


def test_unset_numbers_are_the_recommended_ones_and_not_the_defaults() -> None:
    default = Damping("heat", scope="sequence", threshold=9, margin=9.0)
    assert choose(Policy(damping=Policy.DAMPING_HEAT), default=default) == make_damping("heat", numbers={})
    assert choose(Policy(damping=Policy.DAMPING_REUSE)) == make_damping("reuse", numbers={})


def test_the_default_is_for_requests_with_neither_policy_nor_seed() -> None:
    assert choose(None) == DEFAULT
    assert choose(None, seeded=True) is None
    assert choose(Policy(damping=Policy.DAMPING_OFF)) is None
    for message in (pb.ScoreRequest(), experts_pb2.RouteRequest()):
        assert choose_damping(message, info=ROUTED) is None


def test_a_seed_and_scope_batch_exclude_each_other() -> None:
    for kind in (Policy.DAMPING_HEAT, Policy.DAMPING_CAPACITY, Policy.DAMPING_REUSE):
        field, sentence = refused(Policy(damping=kind, scope=Policy.SCOPE_BATCH), seeded=True)
        assert field == "routing.scope"
        assert "seed" in sentence
    assert refused(Policy(damping=Policy.DAMPING_REUSE), seeded=True)[0] == "routing.scope"
    assert choose(Policy(damping=Policy.DAMPING_HEAT), seeded=True) == make_damping("heat", numbers={})


def test_a_model_without_routers_cannot_be_damped() -> None:
    field, sentence = refused(Policy(damping=Policy.DAMPING_HEAT), info=DENSE)
    assert field == "routing.damping"
    assert "no router" in sentence
    assert choose(Policy(damping=Policy.DAMPING_OFF), info=DENSE) is None
    with pytest.raises(InvalidField) as caught:
        read_policy(Policy(damping=Policy.DAMPING_HEAT), field="policy", info=DENSE)
    assert caught.value.field == "policy.damping"
