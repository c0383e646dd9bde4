"""The door for operators: a gRPC server of its own, on a unix socket and, with mutual TLS, on TCP."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from colibri.v1 import operator_pb2, operator_pb2_grpc
from service.address import read_pem
from service.config import ConfigError, ServeConfig
from service.models import ModelHost
from service.operator import OperatorServicer
from service.operator_socket import prepare, socket_path
from service.reading import ReadingInterceptor

log = logging.getLogger("colibri.service")
_FAREWELL = 0.5  # seconds for watchers to hear that it is over
_CALLS = 256  # at once, watchers included
_SERVICES = (operator_pb2.DESCRIPTOR.services_by_name["Operator"].full_name, reflection.SERVICE_NAME)
_OPTIONS = [
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
]


class OperatorServer:
    """Listens from `start` to `stop`. `places` says where, for the log and for tests."""

    def __init__(self, host: ModelHost, config: ServeConfig) -> None:
        self._host = host
        self._config = config
        self._server: grpc.aio.Server | None = None
        self._servicer: OperatorServicer | None = None
        self.places: list[str] = []
        self.socket: Path | None = None
        self.port = 0  # of operator_address, once bound

    async def start(self, main_port: int) -> None:
        """`main_port` names the socket. ConfigError if a place that was asked for cannot be had; a warning if the usual one cannot."""
        config = self._config
        server = grpc.aio.server(
            options=_OPTIONS, maximum_concurrent_rpcs=_CALLS, interceptors=[ReadingInterceptor(lambda _: None)]
        )
        self._servicer = OperatorServicer(self._host, start_timeout=config.start_timeout)
        operator_pb2_grpc.add_OperatorServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection(_SERVICES, server)
        await self._bind_socket(server, main_port)
        if config.operator_address:
            self.port = await asyncio.to_thread(_bind_tls, server, config)
            self.places.append(f"{config.operator_address.rpartition(':')[0]}:{self.port}")
        if self.places:
            await server.start()
            self._server = server

    async def stop(self) -> None:
        """Ends watchers; breaks off other calls, whose changes go on."""
        if self._server is not None and self._servicer is not None:
            self._servicer.close()
            await self._server.stop(_FAREWELL)
        if self.socket is not None and self.socket.is_socket():
            self.socket.unlink()

    async def _bind_socket(self, server: grpc.aio.Server, main_port: int) -> None:
        path = socket_path(self._config, main_port)
        if path is None:
            return
        asked = self._config.operator_socket != "auto"
        try:
            await asyncio.to_thread(prepare, path, own_folder=not asked)
            _bind(server, path)
        except ConfigError as error:
            if asked:
                raise
            log.warning("operators cannot be served: %s", error)
            return
        self.socket = path
        self.places.append(f"unix:{path}")


def _bind(server: grpc.aio.Server, path: Path) -> None:
    """Open to our user alone from the first moment on."""
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"operators' socket {path}: its folder gives others access to it; choose another operator_socket")
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"operators' socket {path} cannot be had: {error}; choose another operator_socket") from error
    finally:
        os.umask(before)


def _bind_tls(server: grpc.aio.Server, config: ServeConfig) -> int:
    credentials = grpc.ssl_server_credentials(
        [(read_pem("operator_key", config.operator_key), read_pem("operator_cert", config.operator_cert))],
        root_certificates=read_pem("operator_ca", config.operator_ca),
        require_client_auth=True,
    )
    try:
        return server.add_secure_port(config.operator_address, credentials)
    except RuntimeError as error:
        remedy = "is the address free, and does operator_key belong to operator_cert?"
        raise ConfigError(f"operators cannot be served on {config.operator_address}: {error}; {remedy}") from error
