"""What comes to an open port: bytes that are not the protocol, connections that never say anything, and too much of everything."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from tests.multinode.net import Place

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, CONTINUATION, UNKNOWN = 0, 1, 3, 4, 6, 9, 0xEE
END_HEADERS = 4
MANY = 3000
Visit = Callable[[], AbstractContextManager[socket.socket]]


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0, length: int | None = None) -> bytes:
    """An HTTP/2 frame, of another length than it has if told so."""
    announced = len(payload) if length is None else length
    return struct.pack(">I", announced)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


HELLO = PREFACE + frame(SETTINGS)
_JUNK = random.Random(7).randbytes(1 << 16)
SAID = {
    "random bytes": _JUNK,
    "zeros": bytes(1 << 16),
    "an HTTP/1.1 request": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    "endless header of HTTP/1.1": b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 8000,
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + _JUNK[:200],
    "half a preface": PREFACE[:11],
    "a frame longer than allowed": HELLO + frame(DATA, _JUNK[:1000], stream=1, length=(1 << 24) - 1),
    "headers that are junk": HELLO + frame(HEADERS, _JUNK[:500], flags=END_HEADERS, stream=1),
    "headers that go on for ever": HELLO + frame(HEADERS, b"", stream=1) + frame(CONTINUATION, b"\x00" * 16000, stream=1) * 60,
    "data of no stream": HELLO + frame(DATA, b"data", stream=0) + frame(DATA, b"data", stream=77),
    "settings of a wrong size": PREFACE + frame(SETTINGS, b"abc"),
    "settings without end": PREFACE + frame(SETTINGS) * 20000,
    "pings without end": HELLO + frame(PING, b"12345678") * 20000,
    "frames of no kind": HELLO + frame(UNKNOWN, _JUNK[:64]) * 5000,
    "streams that are reset": HELLO + b"".join(frame(HEADERS, b"\x83", flags=END_HEADERS, stream=i) + frame(RST, bytes(4), stream=i)
                                               for i in range(1, 4001, 2)),
}  # fmt: skip


def say(visit: Visit, data: bytes) -> None:
    """Says it, and reads until the other side has had enough or has nothing to say for a while."""
    with visit() as connection, contextlib.suppress(OSError):
        connection.settimeout(0.2)
        connection.sendall(data)
        while connection.recv(1 << 16):
            pass


def visits(source: Place, address: str, port: int) -> Visit:
    """Makes connections from a place; those refused raise OSError."""

    @contextlib.contextmanager
    def visit() -> Iterator[socket.socket]:
        with source.connect(address, port, timeout=5) as connection:
            yield connection

    return visit


@contextlib.contextmanager
def crowd(source: Place, address: str, port: int, *, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections at once, which say `first` and then nothing."""
    made = source.some_sockets(count)
    try:
        for each in made:
            each.settimeout(5)
            with contextlib.suppress(OSError):  # turned away is as good
                each.connect((address, port))
                each.sendall(first)
        yield made
    finally:
        for each in made:
            each.close()


def hang_up(connection: socket.socket) -> None:
    """Ends a connection by a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
