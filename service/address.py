"""Whether the address to listen on can be had, asked before a model is loaded: the system says why not, gRPC only that it is not so."""

from __future__ import annotations

import socket
from pathlib import Path

from service.config import ConfigError, ServeConfig

LONGEST_SOCKET_PATH = 107  # bytes: sun_path of unix(7) without its final zero


def check_address(config: ServeConfig) -> None:
    """Raises ConfigError with the system's reason. May wait for a name server."""
    if config.unix_socket:
        _check_path(Path(config.unix_socket))
        return
    try:
        _try_addresses(config.host.strip("[]"), config.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.address}: {error.strerror or error}; choose another port or host") from error


def _check_path(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"cannot listen on {path}: {path.parent} is not a directory; make it first")
    if path.exists() and not path.is_socket():
        raise ConfigError(f"cannot listen on {path}: it exists and is no socket; choose another path")
    if len(bytes(path)) > LONGEST_SOCKET_PATH:
        raise ConfigError(f"cannot listen on {path}: a socket's path has at most {LONGEST_SOCKET_PATH} bytes; choose a shorter one")
    if path.exists() and answers(path):
        raise ConfigError(f"cannot listen on {path}: another server does; stop it or choose another path")


def answers(path: Path) -> bool:
    """Whether somebody listens there. gRPC would take the path away from a server that does, as from one that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        try:
            trial.connect(bytes(path))
        except BlockingIOError:  # its queue is full
            return True
        except OSError:
            return False
        return True


def _try_addresses(host: str, port: int) -> None:
    """A name may stand for several addresses, of which gRPC takes those it can have; one is enough."""
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(address)
                return
            except OSError as error:
                failure = error
    raise failure
