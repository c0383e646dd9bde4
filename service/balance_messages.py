"""A plan of where experts should lie, and what came of it, as the operators' messages tell it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from colibri.v1 import operator_pb2 as pb

if TYPE_CHECKING:
    from service.nodes.balancing import NodesReport
    from workers.balance import BalancePlan, ExpertMove, ExpertReplica
    from workers.rebalancing import BalanceReport


def report_message(report: BalanceReport, *, took_ms: float) -> pb.RebalanceResponse:
    """What was done, or of a dry run what would be."""
    message = plan_message(report.plan)
    message.took_ms = took_ms
    if report.dry_run:
        return message
    del message.moves[:], message.copies[:], message.dropped[:]
    _extend(message, report.moved, report.replicated, report.dropped)
    message.done = bool(message.moves or message.copies or message.dropped)
    message.bytes = sum(move.bytes for move in report.moved) + sum(copy.bytes for copy in report.replicated)
    if report.refused:
        message.reason = f"the machine refused it: {report.refused} ({report.plan.reason})"
    return message


def nodes_message(found: NodesReport, *, took_ms: float) -> pb.RebalanceResponse:
    """The same of nodes that compute for this server: numbers stand for their names."""
    message = report_message(found.report, took_ms=took_ms)
    message.nodes.extend(found.names)
    if found.report.refused:
        message.reason = f"not all of it was done: {found.report.refused} ({found.report.plan.reason})"
    return message


def plan_message(plan: BalancePlan) -> pb.RebalanceResponse:
    """What would be done."""
    message = pb.RebalanceResponse(
        reason=plan.reason,
        max_over_mean_before=plan.before.ratio,
        max_over_mean_after=plan.after.ratio,
        gain=plan.gain,
        bytes=plan.bytes,
    )
    _extend(message, plan.moves, plan.replicas, plan.dropped)
    return message


def _extend(
    message: pb.RebalanceResponse, moves: Iterable[ExpertMove], copies: Iterable[ExpertReplica], dropped: Iterable[ExpertReplica]
) -> None:
    message.moves.extend(pb.ExpertMove(layer=move.layer, expert=move.expert, source=move.source, target=move.target) for move in moves)
    message.copies.extend(pb.ExpertCopy(layer=copy.layer, expert=copy.expert, node=copy.node) for copy in copies)
    message.dropped.extend(pb.ExpertCopy(layer=copy.layer, expert=copy.expert, node=copy.node) for copy in dropped)
