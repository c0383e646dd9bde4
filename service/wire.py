"""Messages with one long field of bytes, encoded with one copy of it.

The library copies it into the message, into the message around that, and when it writes them, each time to fresh memory: 300 us for
128 KiB on the machine of docs/performance.md, where this takes 5.
"""

from __future__ import annotations

from google.protobuf.message import Message

PROTOCOL = 2
"""Of Experts.Execute as front ends and nodes of one release speak it; both sides must have the same."""
_BYTES = 2  # wire type of what has a length


def enclose(outer: int, message: Message, field: int, data: bytes | bytearray | memoryview) -> bytes:
    """The encoding of a message whose field number `outer` is `message` with `data` as its field number `field`, which is not set in it."""
    if not data:
        inner = message.SerializeToString()
        return b"".join((_key(outer), _varint(len(inner)), inner))
    head = b"".join((message.SerializeToString(), _key(field), _varint(len(data))))
    return b"".join((_key(outer), _varint(len(head) + len(data)), head, data))


def _key(field: int) -> bytes:
    return _varint(field << 3 | _BYTES)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last have the highest bit set."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
