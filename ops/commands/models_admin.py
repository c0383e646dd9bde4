"""`colibri models`: what a running server has loaded; load, unload, and choose the default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.commands.common import console
from ops.commands.convert import Quant
from ops.commands.operate import Ca, Cert, Json, Key, Operator, print_json, print_models, target
from ops.commands.serve import Load, container, parse_size

_PATIENCE = 3600.0  # seconds: a large model is copied into memory, a busy one has requests to finish


def register(app: typer.Typer) -> None:
    """Adds the group, and `swap` by itself."""
    text = "List a running server's models; load, unload and swap them."
    group = typer.Typer(help=text, invoke_without_command=True, rich_markup_mode=None)
    group.callback()(list_models)
    group.command("load", help="Load a further model. Requests may name it once this returns.")(load)
    group.command("unload", help="Let a model finish its requests, then close it. Not the default one.")(unload)
    group.command("swap", help="Make a loaded model the default, for requests that name none.")(swap)
    app.add_typer(group, name="models")
    app.command("swap", help="The same as `colibri models swap`.")(swap)


def list_models(
    context: typer.Context, as_json: Json = False, operator: Operator = "", cert: Cert = "", key: Key = "", ca: Ca = ""
) -> None:
    """Without a subcommand: the list."""
    if context.invoked_subcommand is not None:
        return
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    with operator_stub(target(operator, cert, key, ca)) as stub:
        response = stub.ListLoadedModels(pb.ListLoadedModelsRequest(), timeout=_PATIENCE)
    print_json(response) if as_json else print_models(response.models)


def load(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .colibri file, or demo, tiny or random.")],
    name: Annotated[str, typer.Option(help="Serve it under this name; the container's own if not given.")] = "",
    workers_per_node: Annotated[int | None, typer.Option(min=0, max=255, help="As for serve; else as the server was started.")] = None,
    threads_per_worker: Annotated[int | None, typer.Option(min=1, max=255, help="Likewise.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV cache, for instance 2GiB; planned if not given.")] = None,
    load: Annotated[Load | None, typer.Option(help="map, memfd or auto; else as the server was started.")] = None,
    as_json: Json = False,
    operator: Operator = "",
    cert: Cert = "",
    key: Key = "",
    ca: Ca = "",
) -> None:
    """Prints the model and how long it took."""
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    where = target(operator, cert, key, ca)
    request = pb.LoadModelRequest(
        path=str(_file(model)) if where.local else model,
        name=name,
        workers_per_node=workers_per_node,
        threads_per_worker=threads_per_worker,
        kv_memory=parse_size(kv_memory),
        load=load.value if load else "",
    )
    with operator_stub(where) as stub:
        response = stub.LoadModel(request, timeout=_PATIENCE)
    if as_json:
        print_json(response)
        return
    print_models([response.model])
    console().print(f"loaded in {response.load_ms:.0f} ms")


def _file(model: str) -> Path:
    """The file of a path or name, as the server, on this machine too, sees it."""
    from service.config import cache_dir

    return container(model, cache_dir(), Quant.BF16.value).absolute()


def unload(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    grace: Annotated[float | None, typer.Option(min=0, max=86400, help="Seconds for its requests; else the drain grace.")] = None,
    operator: Operator = "",
    cert: Cert = "",
    key: Key = "",
    ca: Ca = "",
) -> None:
    """Says how many requests were broken off."""
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    with operator_stub(target(operator, cert, key, ca)) as stub:
        response = stub.UnloadModel(pb.UnloadModelRequest(name=name, grace_seconds=grace), timeout=_PATIENCE)
    console().print(f"unloaded {name}; requests broken off: {response.broken_off}", markup=False)


def swap(
    name: Annotated[str, typer.Argument(metavar="NAME")], operator: Operator = "", cert: Cert = "", key: Key = "", ca: Ca = ""
) -> None:
    """Says what was the default before."""
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    with operator_stub(target(operator, cert, key, ca)) as stub:
        response = stub.SwapModel(pb.SwapModelRequest(name=name), timeout=_PATIENCE)
    before = f"it was {response.previous} before" if response.previous != name else "it was before, too"
    console().print(f"{name} is the default ({before}; {response.swap_ms:.2f} ms)", markup=False)
