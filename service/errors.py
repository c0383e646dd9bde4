"""Faults to gRPC status codes, with the google.rpc details that clients act on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from service import faults

DOMAIN = "colibri"
_UNAVAILABLE_RETRY = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status to be: code by name, sentence, details."""

    code: str
    sentence: str
    details: list[Message] = field(default_factory=list)

    def status(self) -> grpc.Status:
        """As grpcio takes it."""
        status = Status(code=Code.Value(self.code), message=self.sentence)
        for detail in self.details:
            status.details.add().Pack(detail)
        return rpc_status.to_status(status)


def refusal(fault: BaseException) -> Refusal:
    """What a caller is told about a fault. Anything that is no Fault is a bug of ours."""
    for kind, make in _MAKERS.items():
        if isinstance(fault, kind):
            return make(fault)
    return Refusal("INTERNAL", f"internal error: {type(fault).__name__}", [_info("BUG")])


def _info(reason: str, **metadata: str) -> ErrorInfo:
    return ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)


def _retry(seconds: float) -> RetryInfo:
    delay = Duration()
    delay.FromMilliseconds(round(seconds * 1000))
    return RetryInfo(retry_delay=delay)


def _invalid(fault: faults.InvalidField) -> Refusal:
    violation = BadRequest.FieldViolation(field=fault.field, description=fault.sentence)
    return Refusal("INVALID_ARGUMENT", str(fault), [BadRequest(field_violations=[violation])])


def _unreadable(fault: faults.UnreadableRequest) -> Refusal:
    return Refusal("INVALID_ARGUMENT", str(fault), [_info("UNREADABLE_REQUEST")])


def _unknown_model(fault: faults.UnknownModel) -> Refusal:
    resource = ResourceInfo(resource_type="colibri.v1.Model", resource_name=fault.name, description=str(fault))
    return Refusal("NOT_FOUND", str(fault), [_info("UNKNOWN_MODEL", model=fault.name), resource])


def _queue_full(fault: faults.QueueFull) -> Refusal:
    return Refusal("RESOURCE_EXHAUSTED", str(fault), [_retry(fault.retry_after), _info("QUEUE_FULL")])


def _too_slow(fault: faults.ClientTooSlow) -> Refusal:
    return Refusal("RESOURCE_EXHAUSTED", str(fault), [_info("CLIENT_TOO_SLOW")])


def _unmeetable(fault: faults.DeadlineUnmeetable) -> Refusal:
    return Refusal("DEADLINE_EXCEEDED", str(fault), [_retry(fault.predicted), _info("DEADLINE_UNMEETABLE")])


def _expired(fault: faults.DeadlineExpired) -> Refusal:
    return Refusal("DEADLINE_EXCEEDED", str(fault), [_info("DEADLINE_EXPIRED")])


def _draining(fault: faults.Draining) -> Refusal:
    return Refusal("UNAVAILABLE", str(fault), [_retry(_UNAVAILABLE_RETRY), _info("DRAINING")])


def _broken_off(reason: str) -> Callable[[faults.ShutDown | faults.WorkersLost | faults.NodesLost], Refusal]:
    """UNAVAILABLE invites a client to send the request again, so it is said only if nothing of it ran."""

    def make(fault: faults.ShutDown | faults.WorkersLost | faults.NodesLost) -> Refusal:
        if fault.ran:
            return Refusal("ABORTED", str(fault), [_info(reason)])
        return Refusal("UNAVAILABLE", str(fault), [_retry(_UNAVAILABLE_RETRY), _info(reason)])

    return make


def _elsewhere(fault: faults.LayersElsewhere) -> Refusal:
    return Refusal("FAILED_PRECONDITION", str(fault), [_info("LAYERS_ELSEWHERE")])


def _engine(fault: faults.EngineFault) -> Refusal:
    return Refusal("INTERNAL", str(fault), [_info(fault.reason)])


def _misfit(fault: faults.StreamMisfit) -> Refusal:
    return Refusal(fault.code, str(fault), [_info(fault.reason)])


def _operator(fault: faults.OperatorFault) -> Refusal:
    return Refusal(fault.code, str(fault), [_info(fault.reason, **fault.metadata)])


_MAKERS: dict[type[faults.Fault], Callable[..., Refusal]] = {
    faults.InvalidField: _invalid,
    faults.UnreadableRequest: _unreadable,
    faults.UnknownModel: _unknown_model,
    faults.QueueFull: _queue_full,
    faults.ClientTooSlow: _too_slow,
    faults.DeadlineUnmeetable: _unmeetable,
    faults.DeadlineExpired: _expired,
    faults.Draining: _draining,
    faults.ShutDown: _broken_off("SHUTDOWN"),
    faults.WorkersLost: _broken_off("WORKER_LOST"),
    faults.NodesLost: _broken_off("NODES_LOST"),
    faults.LayersElsewhere: _elsewhere,
    faults.EngineFault: _engine,
    faults.StreamMisfit: _misfit,
    faults.OperatorFault: _operator,
}
