"""The event loop of a server: asyncio's own, with the wake-ups of grpc.aio taken in together.

grpc.aio's thread writes a byte into a socket for every operation that has ended, and its reader takes one byte and then handles all
operations that have: for 32 messages written in a step the loop would go round 32 times, 31 of them for nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

_READER = "_handle_events"  # of grpc.aio's completion queue
_MOST = 4096  # bytes taken at a time


class ServerLoop(asyncio.SelectorEventLoop):
    """Use it for a server's whole life."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """As asyncio has it, but for the reader of grpc.aio."""
        if isinstance(fd, socket.socket) and is_grpc_reader(callback):
            super().add_reader(fd, _take_together, fd, callback)
        else:
            super().add_reader(fd, callback, *args)


def is_grpc_reader(callback: Callable[..., Any]) -> bool:
    """Whether it is that of grpc.aio's completion queue."""
    while isinstance(callback, partial):
        callback = callback.func
    return getattr(callback, "__name__", "") == _READER


def _take_together(waking: socket.socket, callback: Callable[[], Any]) -> None:
    """Leaves one byte, which is what the callback takes."""
    waiting = len(waking.recv(_MOST, socket.MSG_PEEK))
    if waiting > 1:
        waking.recv(waiting - 1)
    callback()
