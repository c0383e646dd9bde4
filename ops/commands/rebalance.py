"""`colibri rebalance`: experts to the nodes (NUMA, expert) where they make the work even; or what that would bring, by a recording."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import CommandError, console, human_bytes
from ops.commands.operate import Ca, Cert, Json, Key, ModelOption, Operator, print_json, target
from service.printable import printable

if TYPE_CHECKING:
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import OperatorTarget
    from service.recording import Recording

_PATIENCE = 900.0  # seconds: experts move one after the other, held back on purpose
_LISTED = 20  # moves; --json has them all


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(
        help="Move experts between NUMA nodes, or between a server's expert nodes if it has some, so that each has as much to do. "
        "No answer changes by it, and none waits."
    )
    def rebalance(
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
        replicas: Annotated[
            int | None,
            typer.Option(min=0, max=1024, help="Further copies of experts a layer may have (0; between expert nodes: by --nodes-slack)."),
        ] = None,
        recording: Annotated[
            Path | None, typer.Option("--from", metavar="FILE", help="With --dry-run: plan from what `colibri record` wrote; no server.")
        ] = None,
        nodes: Annotated[
            int | None, typer.Option(min=1, max=1024, help="With --from: NUMA nodes to plan for; else those recorded.")
        ] = None,
        last: Annotated[float | None, typer.Option(min=0, help="With --from: only the recording's last so many seconds.")] = None,
        model: ModelOption = "",
        as_json: Json = False,
        operator: Operator = "",
        cert: Cert = "",
        key: Key = "",
        ca: Ca = "",
    ) -> None:
        if recording is None:
            if nodes is not None or last is not None:
                raise typer.BadParameter("--nodes and --last go with --from")
            response = ask(target(operator, cert, key, ca), model=model, dry_run=dry_run, replicas=replicas)
        else:
            if not dry_run:
                raise typer.BadParameter("--from plans without a server: give --dry-run too")
            if operator or model:
                raise typer.BadParameter("--from plans without a server: --operator and --model mean nothing with it")
            response = plan_recorded(recording, nodes=nodes, last=last, replicas=replicas or 0)
        print_json(response) if as_json else show(response, dry_run=dry_run)


def ask(where: OperatorTarget, *, model: str, dry_run: bool, replicas: int | None) -> pb.RebalanceResponse:
    """The server does it, or says what it would do."""
    from colibri.v1 import operator_pb2 as pb
    from ops.operators import operator_stub

    request = pb.RebalanceRequest(model=model, dry_run=dry_run, replicas=replicas)
    with operator_stub(where) as stub:
        return stub.Rebalance(request, timeout=_PATIENCE)


def plan_recorded(path: Path, *, nodes: int | None, last: float | None, replicas: int) -> pb.RebalanceResponse:
    """What would be done for recorded traffic on NUMA nodes."""
    from service.balance_messages import plan_message
    from service.recording import read_recording
    from workers.balance import ONE_NUMA_NODE, plan_balance

    recording = read_recording(path)
    if recording.torn:
        print(f"colibri: {recording.torn}", file=sys.stderr)
    numbers, places = _places(recording, path, nodes)
    load = recording.total(last=last).tokens.tolist()
    plan = plan_balance(load, recording.header.expert_bytes, numbers, places, replicas=replicas)
    reason = ONE_NUMA_NODE if len(numbers) == 1 else f"on {len(numbers)} NUMA nodes, {plan.reason}"
    return plan_message(replace(plan, reason=reason))


def _places(recording: Recording, path: Path, nodes: int | None) -> tuple[list[int], Sequence[Sequence[Sequence[int]]]]:
    """The NUMA nodes and who holds what: as recorded if those are the nodes that are meant, else as the service begins."""
    from ops.bench.balance_nodes import even_placing

    header = recording.header
    recorded = sorted({node for layer in header.places for holders in layer for node in holders})
    if nodes is None and len(recorded) < 2:
        where = "on one NUMA node, or cut over all"
        raise CommandError(f"{path} was recorded with its experts {where}: say with --nodes how many NUMA nodes to plan for")
    if nodes is None or recorded == list(range(nodes)):
        return recorded, header.places
    return list(range(nodes)), even_placing(header.layers, header.experts, nodes)


def show(response: pb.RebalanceResponse, *, dry_run: bool) -> None:
    """The reason, then what goes where."""
    out = console()
    planned = bool(response.moves or response.copies or response.dropped)
    prefix = "would be done: " if dry_run and planned else ""
    out.print(f"{prefix}{printable(response.reason)}", markup=False)
    names: Sequence[object] = response.nodes or range(1 << 32)
    kind = "expert node" if response.nodes else "NUMA node"
    lines = [f"layer {move.layer} expert {move.expert}: {kind} {names[move.source]} to {names[move.target]}" for move in response.moves]
    lines += [f"layer {copy.layer} expert {copy.expert}: a copy on {kind} {names[copy.node]}" for copy in response.copies]
    lines += [f"layer {copy.layer} expert {copy.expert}: no copy on {kind} {names[copy.node]} any more" for copy in response.dropped]
    for line in lines[:_LISTED]:
        out.print(f"  {printable(line)}", markup=False)
    if len(lines) > _LISTED:
        out.print(f"  and {len(lines) - _LISTED} more (--json has all)")
    if response.done:
        out.print(f"{human_bytes(response.bytes)} in {response.took_ms / 1000:.1f} s", markup=False)
