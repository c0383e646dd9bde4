"""Operator.Rebalance: experts to the nodes where they make the work even, by what the last minute brought.

Nodes are NUMA nodes, or with `nodes` set the processes that compute for this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from colibri.v1 import operator_pb2 as pb
from service.balance_messages import nodes_message, report_message
from service.faults import InvalidField, OperatorFault
from service.hosted import Hosted
from service.load import SPANS
from service.models import ModelHost
from service.operator_calls import change

if TYPE_CHECKING:
    from service.nodes.balancing import NodesReport
    from workers.rebalancing import BalanceReport

_Report = TypeVar("_Report")
_MOST_REPLICAS = 1024
_PATIENCE = 600.0  # seconds: experts move one after the other, held back on purpose


async def rebalance(host: ModelHost, hosted: Hosted, request: pb.RebalanceRequest) -> pb.RebalanceResponse:
    """Raises Fault."""
    if request.replicas > _MOST_REPLICAS:
        raise InvalidField("replicas", f"is {request.replicas}; it must lie between 0 and {_MOST_REPLICAS}")
    began = time.perf_counter()
    load = dict(hosted.loads.windows()).get(max(SPANS))
    tokens = load.tokens.tolist() if load is not None else None
    nodes = hosted.nodes
    if nodes is not None:
        counts = tokens if tokens is not None else hosted.team.session.expert_counts().tolist()
        replicas = request.replicas if request.HasField("replicas") else None

        def over_nodes() -> NodesReport:
            return nodes.balancer.balance(counts, dry_run=request.dry_run, replicas=replicas, timeout=_PATIENCE)

        found = await _run(host, hosted, over_nodes, dry_run=request.dry_run)
        return nodes_message(found, took_ms=1e3 * (time.perf_counter() - began))

    def over_numa() -> BalanceReport:
        return hosted.team.rebalance(tokens, dry_run=request.dry_run, replicas=request.replicas, timeout=_PATIENCE)

    report = await _run(host, hosted, over_numa, dry_run=request.dry_run)
    return report_message(report, took_ms=1e3 * (time.perf_counter() - began))


async def _run(host: ModelHost, hosted: Hosted, work: Callable[[], _Report], *, dry_run: bool) -> _Report:
    try:
        if dry_run:
            return await hosted.aside(lambda _: work())
        return await change(host, hosted, "model", lambda _: work())
    except TimeoutError as error:
        raise OperatorFault("ABORTED", "STILL_MOVING", str(error), model=hosted.name) from error
