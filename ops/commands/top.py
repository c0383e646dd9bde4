"""`colibri top`: what a running server does, live."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import CommandError, console
from ops.commands.operate import Ca, Cert, Json, Key, Operator, print_json, target
from ops.interrupt import interrupting

if TYPE_CHECKING:
    from colibri.v1 import operator_pb2 as pb, operator_pb2_grpc

_ASK_PATIENCE = 10.0  # seconds


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Watch a server: workers, lanes, tokens, queue, KV memory, experts. Ctrl-C leaves.")
    def top(
        interval: Annotated[float, typer.Option("--interval", "-i", min=0.05, max=60, help="Seconds between frames.")] = 1.0,
        model: Annotated[str, typer.Option("--model", help="Only this model.")] = "",
        window: Annotated[
            int | None, typer.Option(help="Show what experts had in the last 1, 10 or 60 seconds rather than since the last frame.")
        ] = None,
        once: Annotated[bool, typer.Option("--once", help="One frame, of one interval; without a terminal always.")] = False,
        as_json: Json = False,
        operator: Operator = "",
        cert: Cert = "",
        key: Key = "",
        ca: Ca = "",
    ) -> None:
        from colibri.v1 import operator_pb2 as pb
        from ops.operators import located, operator_stub

        windows = [] if window is None else [window]
        request = pb.WatchStatsRequest(interval_ms=round(interval * 1000), model=model, windows=windows)
        where = located(target(operator, cert, key, ca))
        with operator_stub(where) as stub:
            if as_json:
                print_json(one_message(stub, request))
            elif once or not sys.stdout.isatty():
                show_once(stub, request, place=where.address)
            else:
                show_live(stub, request, place=where.address)


def one_message(stub: operator_pb2_grpc.OperatorStub, request: pb.WatchStatsRequest) -> pb.WatchStatsResponse:
    """The first that covers an interval; the very first covers all the time before."""
    messages = stub.WatchStats(request, timeout=_ASK_PATIENCE + 2 * request.interval_ms / 1000)
    try:
        next(messages)
        return next(messages)
    except StopIteration:
        raise CommandError("the server is on its way down") from None
    finally:
        messages.cancel()


def show_once(stub: operator_pb2_grpc.OperatorStub, request: pb.WatchStatsRequest, *, place: str) -> None:
    """One frame."""
    from ops.top_view import Frame

    earlier, began = ask_machine(stub), time.monotonic()
    message = one_message(stub, request)
    machine = ask_machine(stub)
    console().print(Frame(message, machine, place, earlier, time.monotonic() - began))


def show_live(stub: operator_pb2_grpc.OperatorStub, request: pb.WatchStatsRequest, *, place: str) -> None:
    """Frame after frame, until Ctrl-C or the end of the server."""
    import grpc
    from rich.live import Live

    from ops.top_view import Frame

    messages = stub.WatchStats(request)
    out = console()
    with interrupting(messages.cancel) as interrupted:
        try:
            # Drawn anew four times a second, so that it follows a terminal that changes its size.
            with Live(console=out, screen=True, auto_refresh=True, refresh_per_second=4) as live:
                machine = earlier = ask_machine(stub)
                asked, seconds = time.monotonic(), 0.0
                for message in messages:
                    with contextlib.suppress(grpc.RpcError):  # if the server has gone, the watch itself tells how
                        earlier, machine = machine, ask_machine(stub)
                        asked, seconds = time.monotonic(), time.monotonic() - asked
                    live.update(Frame(message, machine, place, earlier, seconds), refresh=True)
        except grpc.RpcError as failure:
            if interrupted:
                return
            if failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise CommandError("the server has gone") from failure
            raise
        finally:
            messages.cancel()
    if not interrupted:
        out.print("the server has ended")


def ask_machine(stub: operator_pb2_grpc.OperatorStub) -> pb.TopologyResponse:
    """Asked with each frame: free memory, placement and refusals change."""
    from colibri.v1 import operator_pb2 as pb

    return stub.Topology(pb.TopologyRequest(), timeout=_ASK_PATIENCE)
