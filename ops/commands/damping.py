"""The options by which requests and models are damped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from colibri.v1 import inference_pb2 as pb
    from engine_c import Damping

DampingOption = Annotated[
    str | None,
    typer.Option(
        "--damping",
        metavar="KIND[,NAME=VALUE...]",
        help="Relieve experts that are chosen too often: off, heat, capacity or reuse, numbers behind it: heat,margin=0.5.",
    ),
]
ScopeOption = Annotated[
    str | None,
    typer.Option("--damping-scope", help="What is looked at together: the sequence, so that the answer is repeatable, or the batch."),
]


def read_damping(damping: str | None, scope: str | None) -> Damping | None:
    """What the options ask for; None: no damping. BadParameter names the option."""
    from service.damping import DampingError, parse_damping

    if damping is None:
        raise typer.BadParameter("--damping-scope needs --damping, which says of what kind")
    try:
        return parse_damping(damping, scope=scope or "")
    except DampingError as error:
        option = "--damping-scope" if error.name == "scope" else "--damping"
        raise typer.BadParameter(f"{option}: {error}") from None


def read_policy(damping: str | None, scope: str | None) -> pb.RoutingPolicy | None:
    """The same as a request's field; None: not given."""
    if damping is None and scope is None:
        return None
    from service.routing import policy_message

    return policy_message(read_damping(damping, scope))
