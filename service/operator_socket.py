"""Where operators ask a server on the same machine: a unix socket that nobody but its user can open, found without being told."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
import zlib
from pathlib import Path

from service.address import LONGEST_SOCKET_PATH, answers
from service.config import ConfigError, ServeConfig, runtime_dirs

_PREFIX, _SUFFIX = "operator-", ".sock"
_SWEPT_AFTER = 60.0  # seconds


def socket_path(config: ServeConfig, port: int) -> Path | None:
    """Where a server that listens on this port (0: on its unix socket) takes operators' calls. None: nowhere."""
    if config.operator_socket == "none":
        return None
    if config.operator_socket != "auto":
        return Path(config.operator_socket)
    key = str(port) if port else f"{zlib.crc32(os.fsencode(os.path.abspath(config.unix_socket))):08x}"
    return runtime_dirs()[0] / f"{_PREFIX}{key}{_SUFFIX}"


def check_socket(config: ServeConfig) -> None:
    """Whether a socket that was asked for by its path can be had, before a model is loaded for it. Raises ConfigError."""
    if config.operator_socket not in ("auto", "none"):
        prepare(Path(config.operator_socket), own_folder=False)


def prepare(path: Path, *, own_folder: bool) -> None:
    """Makes a path fit to listen on: its folder there, ours and closed to others; nobody listening on it. ConfigError says why not.

    own_folder: the folder is for these sockets alone, and is made if it is missing.
    """
    if own_folder:
        _make_private(path.parent)
        _sweep(path.parent)
    if not path.parent.is_dir():
        raise ConfigError(f"operators' socket {path}: {path.parent} is not a directory; make it first or choose another operator_socket")
    if len(bytes(path)) > LONGEST_SOCKET_PATH:
        raise ConfigError(f"operators' socket {path}: its path has more than {LONGEST_SOCKET_PATH} bytes; choose another operator_socket")
    if os.path.lexists(path) and not path.is_socket():
        raise ConfigError(f"operators' socket {path}: it exists and is no socket; choose another operator_socket")
    if path.exists() and answers(path):
        raise ConfigError(f"operators' socket {path}: another server listens there; stop it or choose another operator_socket")


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as refusal:
        raise ConfigError(f"operators' sockets: {folder}: {refusal.strerror}; choose another operator_socket") from refusal
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"operators' sockets: {folder} is not a directory of ours alone (mode 0700); remove it or set operator_socket")


def _sweep(folder: Path) -> None:
    """Removes what killed servers left, but nothing so young that its server may not listen yet."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _SWEPT_AFTER and path.is_socket() and not answers(path):
                path.unlink()


def running() -> list[Path]:
    """The sockets of this user's servers that answer."""
    found: list[Path] = []
    for folder in runtime_dirs():
        found += sorted(path for path in folder.glob(f"{_PREFIX}*{_SUFFIX}") if answers(path))
    return found


def why_unreachable(path: Path) -> str:
    """Why a socket cannot be connected to; "" if it can."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        try:
            trial.connect(bytes(path))
        except BlockingIOError:  # its queue is full
            return ""
        except OSError as refusal:
            return refusal.strerror or str(refusal)
    return ""
