"""`colibri health`: for container health checks and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import CommandError, describe_rpc

if TYPE_CHECKING:
    import grpc

INFERENCE = "colibri.v1.Inference"


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Ask a server or a node whether it can serve. Exit code 0 if so, 1 if not.")
    def health(
        target: Annotated[str, typer.Argument(metavar="HOST:PORT")] = "localhost:50051",
        service: Annotated[str, typer.Option(help="What is asked about; of a node colibri.v1.Experts.")] = INFERENCE,
        timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 2.0,
        tls_cert: Annotated[str, typer.Option(help="Own certificate, PEM, where mutual TLS is asked for; needs the next two.")] = "",
        tls_key: Annotated[str, typer.Option(help="Its key.")] = "",
        tls_ca: Annotated[str, typer.Option(help="The authority that signed the other side's certificate.")] = "",
        server_name: Annotated[str, typer.Option(help="The name in the other side's certificate, if it is not HOST.")] = "",
    ) -> None:
        credentials = read_credentials(tls_cert, tls_key, tls_ca)
        import grpc

        try:
            status = ask(target, timeout=timeout, service=service, credentials=credentials, server_name=server_name)
        except grpc.RpcError as error:
            raise CommandError(_describe(error, target, service)) from None
        typer.echo(status)
        if status != "SERVING":
            raise CommandError(f"{target} is {status}")


def read_credentials(cert: str, key: str, authority: str) -> grpc.ChannelCredentials | None:
    """Mutual TLS from three PEM files, None if none is named. Raises CommandError."""
    files = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": authority}
    missing = [option for option, path in files.items() if not path]
    if len(missing) == len(files):
        return None
    if missing:
        raise CommandError(f"{', '.join(missing)} missing: mutual TLS needs a certificate, its key and an authority")
    import grpc

    try:
        chain, private, root = (Path(path).read_bytes() for path in (cert, key, authority))
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from None
    return grpc.ssl_channel_credentials(root, private, chain)


def _describe(error: grpc.RpcError, target: str, service: str) -> str:
    import grpc

    if error.code() is grpc.StatusCode.NOT_FOUND:
        return f"{target} has no service {service}" + ("; ask a node with --service colibri.v1.Experts" if service == INFERENCE else "")
    return describe_rpc(error, starts="`colibri serve` or `colibri node`")


def ask(
    target: str,
    *,
    timeout: float,
    service: str = INFERENCE,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
) -> str:
    """The state of a service, by the standard health protocol: 'SERVING', 'NOT_SERVING', ..."""
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

    options = [("grpc.ssl_target_name_override", server_name)] if credentials and server_name else []
    channel = grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target)
    with channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        answer = check(HealthCheckRequest(service=service), timeout=timeout)
    return str(HealthCheckResponse.ServingStatus.Name(answer.status))
