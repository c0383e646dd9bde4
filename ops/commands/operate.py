"""What the operators' commands share: where to ask, and tables of workers and models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import console, human_bytes

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from colibri.v1 import operator_pb2 as pb
    from ops.operators import OperatorTarget

Operator = Annotated[str, typer.Option("--operator", help="Operators' socket (unix:PATH) or HOST:PORT; found by itself on this machine.")]
Cert = Annotated[str, typer.Option("--operator-cert", help="Your certificate, for HOST:PORT; a PEM file.")]
Key = Annotated[str, typer.Option("--operator-key", help="Its key.")]
Ca = Annotated[str, typer.Option("--operator-ca", help="The authority that signed the server's certificate.")]
ModelOption = Annotated[str, typer.Option("--model", help="Name of the model whose workers are meant; the default one if not given.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, fields as in operator.proto.")]

_STATES = {"READY": "green", "STARTING": "yellow", "DRAINING": "yellow", "BACKING_OFF": "red", "FAILED": "bold red", "DEAD": "dim"}


def target(operator: str, cert: str, key: str, ca: str) -> OperatorTarget:
    """From the options."""
    from ops.operators import OperatorTarget

    return OperatorTarget(operator, cert, key, ca)


def print_json(message: Message) -> None:
    """On one line; every field, also those that are zero."""
    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    typer.echo(json.dumps(fields))


def state_name(state: int) -> str:
    """WORKER_STATE_READY as 'ready'."""
    from colibri.v1 import operator_pb2 as pb

    return pb.WorkerState.Name(state).removeprefix("WORKER_STATE_")


def state_markup(state: int) -> str:
    """A worker's state in its colour."""
    name = state_name(state)
    return f"[{_STATES.get(name, 'default')}]{name.lower().replace('_', ' ')}[/]"


def numbers(values: Iterable[int]) -> str:
    """1,2,3,7 as 1-3,7."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def print_workers(workers: Iterable[pb.Worker]) -> None:
    """A line each; a sentence if there are none."""
    from rich.markup import escape
    from rich.table import Table

    if not (workers := list(workers)):
        console().print("no workers: the front end does their part; `colibri scale --workers N` starts some", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "worker", "NUMA node", "state", "for s", "pid", "lane ids", "cpus", "tasks", "local", "restarts", "remarks"):
        table.add_column(heading, no_wrap=heading != "remarks")
    for worker in workers:
        remarks = "; ".join(filter(None, (worker.error or worker.last_end, *worker.degraded)))
        table.add_row(
            escape(worker.model),
            str(worker.index),
            str(worker.node),
            state_markup(worker.state),
            f"{worker.in_state_seconds:.1f}",
            str(worker.pid) if worker.HasField("pid") else "-",
            numbers(worker.lanes),
            numbers(worker.cpus) or "shared",
            str(worker.tasks),
            f"{worker.tasks_local / worker.tasks_homed:.0%}" if worker.tasks_homed else "-",
            str(worker.restarts),
            escape(remarks),
        )
    console().print(table)


def print_models(models: Iterable[pb.LoadedModel]) -> None:
    """A line each."""
    from rich.markup import escape
    from rich.table import Table

    from colibri.v1 import operator_pb2 as pb

    table = Table(box=None, pad_edge=False)
    for heading in ("model", "state", "weights", "size", "KV", "workers", "requests", "file"):
        table.add_column(heading, no_wrap=heading != "file")
    for model in models:
        state = pb.ModelState.Name(model.state).removeprefix("MODEL_STATE_").lower()
        table.add_row(
            escape(model.name),
            "serving (default)" if state == "serving" else state,
            model.quantisation,
            human_bytes(model.file_bytes),
            human_bytes(model.kv_bytes),
            f"{model.workers_ready}/{model.workers_wanted}",
            str(model.requests),
            escape(model.path),
        )
    console().print(table)
