"""Operator.Rebalance: experts to the nodes where they make the work even, by what the last minute brought."""

from __future__ import annotations

import time

from colibri.v1 import operator_pb2 as pb
from service.balance_messages import report_message
from service.faults import InvalidField, OperatorFault
from service.hosted import Hosted
from service.load import SPANS
from service.models import ModelHost
from service.operator_calls import change
from workers.rebalancing import BalanceReport
from workers.team import Team

_MOST_REPLICAS = 1024
_PATIENCE = 600.0  # seconds: experts move one after the other, held back on purpose


async def rebalance(host: ModelHost, hosted: Hosted, request: pb.RebalanceRequest) -> pb.RebalanceResponse:
    """Raises Fault."""
    if request.replicas > _MOST_REPLICAS:
        raise InvalidField("replicas", f"is {request.replicas}; it must lie between 0 and {_MOST_REPLICAS}")
    began = time.perf_counter()
    load = dict(hosted.loads.windows()).get(max(SPANS))
    tokens = load.tokens.tolist() if load is not None else None

    def work(team: Team) -> BalanceReport:
        return team.rebalance(tokens, dry_run=request.dry_run, replicas=request.replicas, timeout=_PATIENCE)

    try:
        if request.dry_run:
            report = await hosted.aside(lambda _: work(hosted.team))
        else:
            report = await change(host, hosted, "model", work)
    except TimeoutError as error:
        raise OperatorFault("ABORTED", "STILL_MOVING", str(error), model=hosted.name) from error
    return report_message(report, took_ms=1e3 * (time.perf_counter() - began))
