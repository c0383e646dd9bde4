"""`colibri workers`, `scale`, `drain` and `restart-worker`: who computes, while the server serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import console, human_bytes
from ops.commands.operate import Ca, Cert, Json, Key, ModelOption, Operator, numbers, print_json, print_workers, target
from service.printable import counted, printable

if TYPE_CHECKING:
    from colibri.v1 import operator_pb2 as pb

_PATIENCE = 300.0  # seconds: the server ends what takes too long by itself, much sooner


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("workers", help="List the workers of all models.")(workers)
    app.command("scale", help="Set how many workers a NUMA node has, and their threads. No request notices.")(scale)
    app.command("drain", help="Let a worker, or a NUMA node's workers, finish and end. `colibri scale` brings them back.")(drain)
    app.command("restart-worker", help="Let a worker end and start it anew.")(restart_worker)
    app.command("topology", help="NUMA nodes, CPUs and memory as the server may use them, where weights lie, and expert nodes.")(topology)


def workers(
    model: Annotated[str, typer.Option("--model", help="Only this model's.")] = "",
    as_json: Json = False,
    operator: Operator = "",
    cert: Cert = "",
    key: Key = "",
    ca: Ca = "",
) -> None:
    """A line each."""
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    with operator_stub(target(operator, cert, key, ca)) as stub:
        response = stub.ListWorkers(pb.ListWorkersRequest(model=model), timeout=_PATIENCE)
    print_json(response) if as_json else print_workers(response.workers)


def scale(
    node: Annotated[int | None, typer.Option(min=0, help="NUMA node; all of them if not given.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, max=255, help="Worker processes of the NUMA node.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=255, help="Threads of each worker.")] = None,
    model: ModelOption = "",
    as_json: Json = False,
    operator: Operator = "",
    cert: Cert = "",
    key: Key = "",
    ca: Ca = "",
) -> None:
    """Prints the workers as they are then."""
    if workers is None and threads is None:
        raise typer.BadParameter("give --workers, --threads or both")
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    request = pb.ScaleWorkersRequest(model=model, node=node, workers=workers, threads=threads)
    with operator_stub(target(operator, cert, key, ca)) as stub:
        response = stub.ScaleWorkers(request, timeout=_PATIENCE)
    print_json(response) if as_json else print_workers(response.workers)


def drain(
    worker: Annotated[int | None, typer.Option(min=0, help="The worker, as `colibri workers` numbers it.")] = None,
    node: Annotated[int | None, typer.Option(min=0, help="All workers of this NUMA node.")] = None,
    model: ModelOption = "",
    as_json: Json = False,
    operator: Operator = "",
    cert: Cert = "",
    key: Key = "",
    ca: Ca = "",
) -> None:
    """Prints the workers as they are then."""
    if (worker is None) == (node is None):
        raise typer.BadParameter("give --worker or --node, one of them")
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    request = pb.DrainRequest(model=model, node=node) if worker is None else pb.DrainRequest(model=model, worker=worker)
    with operator_stub(target(operator, cert, key, ca)) as stub:
        response = stub.Drain(request, timeout=_PATIENCE)
    print_json(response) if as_json else print_workers(response.workers)


def restart_worker(
    worker: Annotated[int, typer.Argument(min=0, metavar="N", help="The worker, as `colibri workers` numbers it.")],
    model: ModelOption = "",
    as_json: Json = False,
    operator: Operator = "",
    cert: Cert = "",
    key: Key = "",
    ca: Ca = "",
) -> None:
    """Prints the worker as it is then."""
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    with operator_stub(target(operator, cert, key, ca)) as stub:
        response = stub.RestartWorker(pb.RestartWorkerRequest(model=model, worker=worker), timeout=_PATIENCE)
    print_json(response) if as_json else print_workers([response.worker])


def topology(as_json: Json = False, operator: Operator = "", cert: Cert = "", key: Key = "", ca: Ca = "") -> None:
    """The machine by NUMA node, each model's placement, then the expert nodes."""
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    with operator_stub(target(operator, cert, key, ca)) as stub:
        response = stub.Topology(pb.TopologyRequest(), timeout=_PATIENCE)
    if as_json:
        print_json(response)
        return
    out = console()
    for node in response.nodes:
        distances = f", distances {' '.join(map(str, node.distances))}" if len(node.distances) > 1 else ""
        out.print(f"NUMA node {node.id}: CPUs {numbers(node.cpus) or 'none'}, {human_bytes(node.memory_bytes)}{distances}", markup=False)
    quota = f", CPU quota {response.cpu_quota:.2f}" if response.HasField("cpu_quota") else ""
    free = f"{human_bytes(response.memory_available_bytes)} of {human_bytes(response.memory_limit_bytes)} free"
    out.print(f"{counted(len(response.cores), 'core')}, {free}{quota}")
    for placement in response.placements:
        what = f"{human_bytes(placement.bytes)} by {placement.load_mode}, placement {placement.placement}: {placement.reason}"
        out.print(f"{placement.model}: {what}", markup=False)
        for shard in placement.shards:
            found = f", {shard.local_bytes / max(1, shard.bytes):.1%} found there" if shard.HasField("local_bytes") else ""
            out.print(f"  NUMA node {shard.node}: {human_bytes(shard.bytes)}{found}, {human_bytes(shard.huge_bytes)} on huge pages")
        for refused in placement.degraded:
            out.print(f"  degraded: {printable(refused)}", markup=False)
    for remote in response.remote_nodes:
        out.print(remote_line(remote), markup=False)


def remote_line(node: pb.RemoteNode) -> str:
    """A node on another machine: what it holds and does, or why it does nothing. Printable, whatever it says of itself."""
    return printable(_told(node))


def _told(node: pb.RemoteNode) -> str:
    state = node_state(node)
    head = f"expert node {node.name or '(unnamed)'} at {node.address}, for {node.model}: {state} for {node.in_state_seconds:.0f} s"
    if state != "ready":
        return f"{head}{': ' if node.reason else ''}{node.reason}"
    mean = f", {node.round_trip_ms / node.batches:.2f} ms a batch" if node.batches else ""
    batches = "1 batch" if node.batches == 1 else f"{node.batches} batches"
    done = f"{batches}, {counted(node.rows, 'row')}, {node.rows_per_second:.0f} a second of late{mean}"
    return f"{head}; {holding(node)}; {counted(node.lanes, 'lane')} ({node.isa}); {done}; lost {counted(node.losses, 'time')}"


def holding(node: pb.RemoteNode) -> str:
    """What a node has in memory for us."""
    layers = ", ".join(f"{part.first}-{part.end - 1}" for part in node.layers)
    experts = sum(len(share.experts) for share in node.shares)
    return f"{f'layers {layers}' if layers else counted(experts, 'expert')}, {human_bytes(node.share_bytes)}"


def node_state(node: pb.RemoteNode) -> str:
    """In words."""
    from colibri.v1 import operator_pb2 as pb

    if node.state == pb.REMOTE_NODE_STATE_LOST and not node.name:
        return "not reached yet"
    return pb.RemoteNodeState.Name(node.state).removeprefix("REMOTE_NODE_STATE_").lower()
