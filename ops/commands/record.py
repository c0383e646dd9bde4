"""`colibri record`: how a running server's experts are used, into a file for the planner and for simulations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import CommandError, check_output, console, human_bytes
from ops.commands.operate import Ca, Cert, Key, Operator, target
from ops.interrupt import interrupting
from service.printable import counted

if TYPE_CHECKING:
    from colibri.v1 import operator_pb2 as pb, operator_pb2_grpc
    from service.recording import Header

_ASK_PATIENCE = 10.0  # seconds
_LEAST_SIZE = 1 << 16


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Record how a model's experts are used, window by window, until Ctrl-C. `colibri rebalance --from` reads it.")
    def record(
        out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, JSON lines.")],
        interval: Annotated[float, typer.Option("--interval", "-i", min=0.05, max=60, help="Seconds of a window.")] = 1.0,
        seconds: Annotated[float | None, typer.Option(min=0.05, help="End after so long; else with Ctrl-C.")] = None,
        max_size: Annotated[str, typer.Option(help="Most bytes to keep; then the older half, OUT.1, is given up.")] = "256MiB",
        model: Annotated[str, typer.Option("--model", help="Name of the model; the default one if not given.")] = "",
        operator: Operator = "",
        cert: Cert = "",
        key: Key = "",
        ca: Ca = "",
    ) -> None:
        from ops.operators import operator_stub
        from ops.recorder import former

        most = _parse_size(max_size)
        check_output(out)
        for path in (out, former(out)):
            if path.exists():
                raise CommandError(f"{path} exists; remove it or record to another file")
        with operator_stub(target(operator, cert, key, ca)) as stub:
            _record(stub, out, interval=interval, seconds=seconds, most=most, model=model)


def _record(stub: operator_pb2_grpc.OperatorStub, out: Path, *, interval: float, seconds: float | None, most: int, model: str) -> None:
    """Says at the end what came of it."""
    import grpc

    from colibri.v1 import operator_pb2 as pb
    from ops.recorder import Recorder
    from service.load_messages import read_load
    from service.recording import Window

    name = model or _default(stub)
    header = ask_header(stub, name, interval=interval)
    messages = stub.WatchStats(pb.WatchStatsRequest(interval_ms=round(1000 * interval), model=name))
    recorder = Recorder(out, header, most)
    at, ended = 0.0, ""
    with interrupting(messages.cancel) as interrupted:
        try:
            for load in _loads(messages):
                at += load.seconds
                recorder.write(Window(at, read_load(load)))
                if seconds is not None and at >= seconds - 1e-3:
                    break
            else:
                ended = "" if interrupted else f"; then {name} or its server ended"
        except grpc.RpcError as failure:
            if failure.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
            if not interrupted:
                raise CommandError(f"the server has gone; {out} has {counted(recorder.windows, 'window')}") from failure
        finally:
            recorder.close()
            messages.cancel()
    before = f", the earlier ones in {recorder.former}" if recorder.former.exists() else ""
    size = human_bytes(out.stat().st_size)
    windows = counted(recorder.windows, "window")
    console(stderr=True).print(f"{windows}, {at:.1f} s of {name}, in {out} ({size}{before}){ended}", markup=False)


def _loads(messages: Iterator[pb.WatchStatsResponse]) -> Iterator[pb.Load]:
    """Of the one model that is watched; the first message, of all the time before, is passed over. Ends when the model has gone."""
    next(messages, None)
    for message in messages:
        if not message.models:
            return
        yield message.models[0].load


def _default(stub: operator_pb2_grpc.OperatorStub) -> str:
    """Name of the default model."""
    from colibri.v1 import operator_pb2 as pb

    models = stub.ListLoadedModels(pb.ListLoadedModelsRequest(), timeout=_ASK_PATIENCE).models
    serving = [model.name for model in models if model.state == pb.MODEL_STATE_SERVING]
    if not serving:
        raise CommandError("the server has no default model just now: name one with --model")
    return serving[0]


def ask_header(stub: operator_pb2_grpc.OperatorStub, model: str, *, interval: float) -> Header:
    """What a recording says of the model."""
    from colibri.v1 import operator_pb2 as pb
    from service.load_messages import read_places
    from service.recording import Header

    (placement,) = stub.Topology(pb.TopologyRequest(model=model), timeout=_ASK_PATIENCE).placements
    return Header(
        model=model,
        layers=placement.layers,
        experts=placement.experts,
        top_k=placement.experts_per_token,
        expert_bytes=placement.expert_bytes,
        interval_seconds=interval,
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        places=read_places(placement),
    )


def _parse_size(text: str) -> int:
    from service.config import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"--max-size {text}: it must be {error}") from None
    if size < _LEAST_SIZE:
        raise typer.BadParameter(f"--max-size {text}: it must be at least {human_bytes(_LEAST_SIZE)}")
    return size
