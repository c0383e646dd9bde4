"""Finds and reaches the operators' side of a server: on this machine without being told where, elsewhere with certificates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from colibri.v1 import operator_pb2_grpc
from ops.commands.common import CommandError
from ops.tls import why_refused
from service.config import runtime_dirs
from service.operator_socket import running, why_unreachable

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.keepalive_time_ms", 30_000)]


@dataclass(frozen=True, slots=True)
class OperatorTarget:
    """Where to ask: an address ("" finds the server of this machine) and, for TCP, the operator's PEM files."""

    address: str = ""
    cert: str = ""
    key: str = ""
    ca: str = ""

    @property
    def local(self) -> bool:
        """Whether it is a socket, of this machine."""
        return not self.address or self.address.startswith("unix:") or "/" in self.address


@contextmanager
def operator_stub(target: OperatorTarget) -> Iterator[operator_pb2_grpc.OperatorStub]:
    """The service to call. CommandError if it cannot be found or reached, or TLS does not let us in."""
    with _channel(located(target)) as channel:
        try:
            yield operator_pb2_grpc.OperatorStub(channel)
        except grpc.RpcError as failure:
            if target.local or failure.code() is not grpc.StatusCode.UNAVAILABLE or not (reason := why_refused(target)):
                raise
            raise CommandError(f"cannot reach operators at {target.address}: {reason}") from failure


def located(target: OperatorTarget) -> OperatorTarget:
    """The same with an address, that of the one server that runs here if it has none. CommandError if none or several do."""
    if not target.local:
        return target
    path = Path(target.address.removeprefix("unix:")) if target.address else find_socket()
    return replace(target, address=f"unix:{path.absolute()}")


def _channel(target: OperatorTarget) -> grpc.Channel:
    if target.local:
        check_socket(Path(target.address.removeprefix("unix:")))
        return grpc.insecure_channel(target.address, options=_OPTIONS)
    missing = [f"--operator-{name}" for name in ("cert", "key", "ca") if not getattr(target, name)]
    if missing:
        raise CommandError(f"operators at {target.address} are reached by mutual TLS: give {', '.join(missing)}")
    files = [_read(name) for name in (target.ca, target.key, target.cert)]
    return grpc.secure_channel(target.address, grpc.ssl_channel_credentials(*files), options=_OPTIONS)


def find_socket() -> Path:
    """That of the one server that runs. CommandError if none or several do."""
    sockets = running()
    if len(sockets) == 1:
        return sockets[0]
    if sockets:
        names = ", ".join(f"unix:{path}" for path in sockets)
        raise CommandError(f"several servers run here; choose one with --operator: {names}")
    others = [folder.name.removeprefix("colibri-") for folder in Path("/tmp").glob("colibri-*") if _of_another(folder)]
    hint = f"; there seem to be servers of user {', '.join(sorted(others))}, which only that user can operate" if others else ""
    where = " or ".join(map(str, runtime_dirs()))
    raise CommandError(f"no running server found in {where}: start one with `colibri serve`, or name its socket with --operator{hint}")


def check_socket(path: Path) -> None:
    """CommandError, with the system's reason, if nobody can be reached there."""
    reason = why_unreachable(path)
    if not reason:
        return
    owner = f"; it belongs to user {path.stat().st_uid}, operate it as that user" if _exists(path) and not os.access(path, os.W_OK) else ""
    remedy = owner or "; is the server running? Its log says where operators are served"
    raise CommandError(f"cannot reach operators' socket {path}: {reason}{remedy}")


def _of_another(folder: Path) -> bool:
    name = folder.name.removeprefix("colibri-")
    return name.isdigit() and int(name) != os.getuid() and folder.is_dir() and folder.stat().st_uid == int(name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
