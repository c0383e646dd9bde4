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
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

    with grpc.insecure_channel(target) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        answer = check(HealthCheckRequest(service="colibri.v1.Inference"), timeout=timeout)
    return str(HealthCheckResponse.ServingStatus.Name(answer.status))
