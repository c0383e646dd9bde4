"""Whether the addresses to listen on can be had, asked before a model is loaded: the system says why not, gRPC only that it is not so."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from service.config import ConfigError, ServeConfig

LONGEST_SOCKET_PATH = 107  # bytes: sun_path of unix(7) without its final zero


def check_address(config: ServeConfig) -> None:
    """Clients' address, operators', and the certificates for that. Raises ConfigError with the reason. May wait for a name server."""
    if config.unix_socket:
        _check_path(Path(config.unix_socket))
    else:
        check_port(config.host, config.port, f"cannot listen on {config.address}", "choose another port or host")
    if config.operator_address:
        host, _, port = config.operator_address.rpartition(":")
        refusal = f"operators cannot be served on {config.operator_address}"
        if config.port and not config.unix_socket and (host, int(port)) == (config.host, config.port):
            raise ConfigError(f"{refusal}: clients are to be served there; choose another operator_address")
        check_port(host, int(port), refusal, "choose another operator_address")
        for setting in ("operator_key", "operator_cert", "operator_ca"):
            read_pem(setting, getattr(config, setting))
    if config.nodes_cert:
        check_pair(config, "nodes_cert", "nodes_key", "nodes_ca")


def check_pair(config: object, cert: str, key: str, authority: str) -> None:
    """That the three settings name PEM files, and that the key belongs to the certificate. Raises ConfigError."""
    files = {setting: getattr(config, setting) for setting in (cert, key, authority)}
    for setting, path in files.items():
        read_pem(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(files[cert], files[key], password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key} {files[key]} is not the key of {cert} {files[cert]}: give the two that were made together") from error
        raise ConfigError(f"{cert} {files[cert]} and {key} {files[key]} can't be used: {error.reason or error}") from error


def read_pem(setting: str, path: str) -> bytes:
    """A PEM file. Raises ConfigError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        remedy = "" if setting.startswith("operator_") else "; `make certs` makes such files (docs/deployment.md, Mutual TLS)"
        raise ConfigError(f"{setting} {path}: {error.strerror}{remedy}") from error
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{setting} {path} is no PEM file")
    return data


def check_port(host: str, port: int, refusal: str, remedy: str) -> None:
    """That it can be listened on. Raises ConfigError, with the refusal, the system's reason and the remedy."""
    try:
        _try_addresses(host.strip("[]"), port)
    except OSError as error:
        raise ConfigError(f"{refusal}: {error.strerror or error}; {remedy}") from error


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
