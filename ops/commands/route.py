"""`colibri route`: which experts the tokens of a text go to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import check_output, console, parse_ints
from ops.commands.damping import DampingOption, ScopeOption, read_policy
from ops.commands.generate import check_ids
from ops.commands.streaming import Timeout

if TYPE_CHECKING:
    from colibri.v1 import experts_pb2 as pb

_TARGET = "localhost:50051"


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Show which experts the tokens of a text (argument or stdin) go to, layer by layer.")
    def route(
        prompt: Annotated[str | None, typer.Argument(help="The text; - or nothing reads stdin.")] = None,
        tokens: Annotated[str | None, typer.Option(help="Token ids instead of text, 1,2,3 or @file.")] = None,
        chat: Annotated[bool, typer.Option("--chat", help="As what a user says, in the model's chat template.")] = False,
        model: Annotated[str, typer.Option(help="A .colibri file, demo or tiny: computed here. With --target: the server's.")] = "",
        target: Annotated[str, typer.Option("--target", "-t", help=f"Server to ask ({_TARGET} if there is no --model).")] = "",
        layer: Annotated[list[int] | None, typer.Option(min=0, help="Only this layer; may be repeated.")] = None,
        damping: DampingOption = None,
        damping_scope: ScopeOption = None,
        timeout: Timeout = None,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
        plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw a heat map, too.")] = None,
    ) -> None:
        if prompt is not None and tokens is not None:
            raise typer.BadParameter("give a prompt or --tokens, not both")
        if chat and tokens is not None:
            raise typer.BadParameter("--chat is for a text, not for --tokens")
        if plot is not None:
            check_output(plot)
        ids = check_ids(parse_ints(tokens, option="--tokens")) if tokens is not None else None
        policy = read_policy(damping, damping_scope)
        text = (sys.stdin.read() if prompt in (None, "-") else prompt) if ids is None else None
        from service.client import route_request

        messages = [("user", text)] if chat and text is not None else None
        request = route_request(None if chat else text, tokens=ids, messages=messages, layers=layer or (), routing=policy)
        answer = _here(model, request) if model and not target else _asked(target or _TARGET, model, request, timeout)
        _show(answer, as_json=as_json, plot=plot)


def _here(model: str, request: pb.RouteRequest) -> pb.RouteResponse:
    from ops.commands.convert import Quant
    from ops.commands.serve import container
    from ops.routes import compute_routes
    from service.config import cache_dir

    return compute_routes(container(model, cache_dir(), Quant.BF16.value), request)


def _asked(target: str, model: str, request: pb.RouteRequest, timeout: float | None) -> pb.RouteResponse:
    from service.client import Client

    request.model = model
    with Client(target) as client:
        return client.route(request, timeout=timeout)


def _show(answer: pb.RouteResponse, *, as_json: bool, plot: Path | None) -> None:
    from ops import route_view

    routes = route_view.RouteTable.of(answer)
    if plot is not None:
        route_view.draw(routes, plot)
    if as_json:
        typer.echo(json.dumps(route_view.as_json(routes)))
        return
    screen = console()
    for part in route_view.tables(routes):
        screen.print(part)
    if plot is not None:
        screen.print(f"picture: {plot}", markup=False)
