"""`colibri health`: for container health checks and scripts."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.commands.common import CommandError


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Ask a server whether it can serve. Exit code 0 if so, 1 if not.")
    def health(
        target: Annotated[str, typer.Argument(metavar="HOST:PORT")] = "localhost:50051",
        timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 2.0,
    ) -> None:
        status = ask(target, timeout=timeout)
        typer.echo(status)
        if status != "SERVING":
            raise CommandError(f"{target} is {status}")


def ask(target: str, *, timeout: float) -> str:
    """The readiness of the Inference service, by the standard health protocol: 'SERVING', 'NOT_SERVING', ..."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service="colibri.v1.Inference")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
