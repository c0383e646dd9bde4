"""grpc.health.v1. "" is liveness: this process answers. "colibri.v1.Inference" is readiness: a request sent now would be computed.
"colibri.v1.Inference/NAME" is the same of one model, by name. "colibri.v1.Experts" goes with it: the same models compute for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb, health_pb2_grpc

from service.engine import Progress
from service.faults import shown

LIVENESS = ""
READINESS = "colibri.v1.Inference"
EXPERTS = "colibri.v1.Experts"
_SERVING = pb.HealthCheckResponse.SERVING
_NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN
_Context = grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse]


def can_serve(progress: Progress, *, now: float, stall_after: float, anyone_computes: bool) -> bool:
    """Judged by what the engine does, not by whether its thread exists: it is up, has lanes, and no step takes too long."""
    busy = progress.busy_since is not None
    stalled = progress.busy_since is not None and now - progress.busy_since > stall_after
    return progress.alive and anyone_computes and not (busy and progress.lanes_gone) and not stalled


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Statuses that never hang on a watcher that reads slowly: each watcher waits for the next change on its own."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {LIVENESS: _SERVING, READINESS: _NOT_SERVING, EXPERTS: _NOT_SERVING}
        self._changed = asyncio.Event()

    def set(self, service: str, *, serving: bool) -> None:
        """Changes a status and tells the watchers. On the loop's thread."""
        status = _SERVING if serving else _NOT_SERVING
        if self._statuses.get(service) != status:
            self._statuses[service] = status
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def keep(self, services: Collection[str]) -> None:
        """Forgets all services but these."""
        gone = [service for service in self._statuses if service not in services]
        for service in gone:
            del self._statuses[service]
        if gone:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def Check(self, request: pb.HealthCheckRequest, context: _Context) -> pb.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that is not here."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {shown(request.service)} here; there are '' and '{READINESS}'")
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: _Context) -> AsyncIterator[pb.HealthCheckResponse]:
        """The status now and after each change; SERVICE_UNKNOWN for a service that is not here."""
        told: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != told:
                told = status
                yield pb.HealthCheckResponse(status=status)
            else:
                await changed.wait()
