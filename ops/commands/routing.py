"""`colibri routing`: how a running server's model is damped by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ops.commands.common import console
from ops.commands.damping import DampingOption, ScopeOption, read_policy
from ops.commands.operate import Ca, Cert, Json, Key, ModelOption, Operator, print_json, target

if TYPE_CHECKING:
    from colibri.v1 import inference_pb2

_PATIENCE = 30.0  # seconds


def register(app: typer.Typer) -> None:
    """Adds the command."""
    text = "Show or, with --damping, change how a model routes requests that have neither a policy of their own nor a seed."
    app.command("routing", help=text)(routing)


def routing(
    damping: DampingOption = None,
    damping_scope: ScopeOption = None,
    model: ModelOption = "",
    as_json: Json = False,
    operator: Operator = "",
    cert: Cert = "",
    key: Key = "",
    ca: Ca = "",
) -> None:
    """Prints the policy as it is then."""
    policy = read_policy(damping, damping_scope)
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    with operator_stub(target(operator, cert, key, ca)) as stub:
        if policy is None:
            shown = stub.GetRoutingPolicy(pb.GetRoutingPolicyRequest(model=model), timeout=_PATIENCE)
            print_json(shown) if as_json else _print(f"{shown.model}: {_words(shown.policy)}")
        else:
            changed = stub.SetRoutingPolicy(pb.SetRoutingPolicyRequest(model=model, policy=policy), timeout=_PATIENCE)
            print_json(changed) if as_json else _print(f"{changed.model}: {_words(changed.policy)} (before: {_words(changed.previous)})")


def _print(line: str) -> None:
    console().print(line, markup=False, soft_wrap=True)


def _words(policy: inference_pb2.RoutingPolicy) -> str:
    from service.damping import describe_damping
    from service.routing import damping_of

    return describe_damping(damping_of(policy))
