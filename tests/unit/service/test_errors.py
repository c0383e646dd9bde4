"""Every fault has a status code and the details that clients act on."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from google.rpc.status_pb2 import Status

from service import faults
from service.errors import refusal

CASES = [
    (faults.InvalidField("max_tokens", "is 0"), grpc.StatusCode.INVALID_ARGUMENT, {"BadRequest"}),
    (faults.UnreadableRequest("corrupt"), grpc.StatusCode.INVALID_ARGUMENT, {"ErrorInfo"}),
    (faults.UnknownModel("gpt", served=["m"]), grpc.StatusCode.NOT_FOUND, {"ErrorInfo", "ResourceInfo"}),
    (faults.QueueFull("full", retry_after=1.0), grpc.StatusCode.RESOURCE_EXHAUSTED, {"RetryInfo", "ErrorInfo"}),
    (faults.ClientTooSlow(64), grpc.StatusCode.RESOURCE_EXHAUSTED, {"ErrorInfo"}),
    (faults.DeadlineUnmeetable(predicted=2.0, remaining=1.0), grpc.StatusCode.DEADLINE_EXCEEDED, {"RetryInfo", "ErrorInfo"}),
    (faults.DeadlineExpired(), grpc.StatusCode.DEADLINE_EXCEEDED, {"ErrorInfo"}),
    (faults.Draining(), grpc.StatusCode.UNAVAILABLE, {"RetryInfo", "ErrorInfo"}),
    (faults.ShutDown(ran=False), grpc.StatusCode.UNAVAILABLE, {"RetryInfo", "ErrorInfo"}),
    (faults.ShutDown(ran=True), grpc.StatusCode.ABORTED, {"ErrorInfo"}),
    (faults.WorkersLost(ran=False, sentence="none left"), grpc.StatusCode.UNAVAILABLE, {"RetryInfo", "ErrorInfo"}),
    (faults.NodesLost(ran=False, sentence="none left"), grpc.StatusCode.UNAVAILABLE, {"RetryInfo", "ErrorInfo"}),
    (faults.WorkersLost(ran=True, sentence="none left"), grpc.StatusCode.ABORTED, {"ErrorInfo"}),
    (faults.NodesLost(ran=True, sentence="none left"), grpc.StatusCode.ABORTED, {"ErrorInfo"}),
    (faults.LayersElsewhere("0-15", trace=False), grpc.StatusCode.FAILED_PRECONDITION, {"ErrorInfo"}),
    (faults.StreamMisfit("NOT_FOUND", "NO_SUCH_MODEL", "not here"), grpc.StatusCode.NOT_FOUND, {"ErrorInfo"}),
    (faults.EngineFault("NUMERIC", "a NaN"), grpc.StatusCode.INTERNAL, {"ErrorInfo"}),
    (faults.OperatorFault("ALREADY_EXISTS", "MODEL_NAME_TAKEN", "taken", model="m"), grpc.StatusCode.ALREADY_EXISTS, {"ErrorInfo"}),
    (KeyError("a bug"), grpc.StatusCode.INTERNAL, {"ErrorInfo"}),
]


@pytest.mark.parametrize(("fault", "code", "details"), CASES, ids=[f"{type(fault).__name__}-{code.name}" for fault, code, _ in CASES])
def test_a_fault_becomes_its_status(fault: Exception, code: grpc.StatusCode, details: set[str]) -> None:
    status = refusal(fault).status()
    assert status.code is code
    (packed,) = [value for key, value in status.trailing_metadata if key == "grpc-status-details-bin"]
    rich = Status.FromString(packed)
    assert {detail.type_url.rpartition(".")[2] for detail in rich.details} == details
    assert rich.message == status.details
    if isinstance(fault, faults.Fault):
        assert status.details == str(fault)


def test_every_kind_of_fault_is_covered() -> None:
    assert {type(fault) for fault, _, _ in CASES} >= set(faults.Fault.__subclasses__())


def test_a_bug_does_not_tell_its_innards() -> None:
    assert "secret" not in refusal(ValueError("secret")).sentence


@pytest.mark.parametrize("text", ["m", "é☃", "\U0001f40d", "\0"], ids=["ascii", "wide", "widest", "escaped"])
@pytest.mark.parametrize("fault", [lambda text: faults.UnknownModel(text, served=["m"]), lambda text: faults.InvalidField("chat", text)])
def test_a_status_fits_the_headers_it_travels_in_whatever_the_caller_wrote(fault: Callable[[str], faults.Fault], text: str) -> None:
    status = refusal(fault(text * 1_000_000)).status()
    escaped = sum(1 if 0x20 <= byte < 0x7F else 3 for byte in status.details.encode())
    packed = sum(len(value) for _, value in status.trailing_metadata)
    assert escaped + packed * 4 / 3 < 8000
