"""Messages with one long field of bytes, encoded with one copy of it and read with none.

The library copies it into the message, into the message around that, and when it writes them, each time to fresh memory: 300 us for
128 KiB on the machine of docs/performance.md, where this takes 5. When it reads, it copies it into the message, and again at every look.
"""

from __future__ import annotations

from google.protobuf.message import Message

PROTOCOL = 2
"""Of Experts.Execute as front ends and nodes of one release speak it; both sides must have the same."""
_BYTES = 2  # wire type of what has a length
_FIXED = {1: 8, 5: 4}  # bytes of wire types that always have as many
_LONG = 1 << 15  # bytes from which on looking for the field takes less than copying it


def enclose(outer: int, message: Message, field: int, data: bytes | bytearray | memoryview) -> bytes:
    """The encoding of a message whose field number `outer` is `message` with `data` as its field number `field`, which is not set in it."""
    if not data:
        inner = message.SerializeToString()
        return b"".join((_key(outer), _varint(len(inner)), inner))
    head = b"".join((message.SerializeToString(), _key(field), _varint(len(data))))
    return b"".join((_key(outer), _varint(len(head) + len(data)), head, data))


def disclose(raw: bytes, outer: int, field: int) -> tuple[bytes, memoryview]:
    """The encoding of the same message without that field, and the field's data, which is a view of `raw`. What is short or not quite as
    `enclose` makes it comes back whole and with no data: the library reads it, or says what is wrong with it."""
    if len(raw) >= _LONG and raw[0] == outer << 3 | _BYTES:
        length, begin = _length(raw, 1)
        if length >= 0 and begin + length == len(raw) and (found := _find(raw, begin, field)) is not None:
            key, data, end = found
            rest = raw[begin:key] + raw[end:]
            return b"".join((raw[:1], _varint(len(rest)), rest)), memoryview(raw)[data:end]
    return raw, memoryview(b"")


def _find(raw: bytes, at: int, field: int) -> tuple[int, int, int] | None:
    """Where the field's key, its data and what is behind it begin, of a message from `at` to the end; None: not there exactly once, or not
    easily found."""
    found = None
    while at < len(raw):
        key, kind = at, raw[at] & 7
        if raw[key] > 127:  # of two bytes or more: a field that none of ours has
            return None
        at = data = key + 1
        if kind == _BYTES:
            length, data = _length(raw, at)
            if length < 0:
                return None
            at = data + length
        elif kind == 0:
            at = _behind_number(raw, at)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            return None
        if raw[key] == field << 3 | _BYTES:
            if found is not None:
                return None
            found = key, data, at
    return found if at == len(raw) else None


def _length(raw: bytes, at: int) -> tuple[int, int]:
    """A length of at most four bytes, and where what has it begins; -1: there is none."""
    length = 0
    for shift, byte in zip(range(0, 28, 7), raw[at : at + 4], strict=False):
        length |= (byte & 127) << shift
        if byte < 128:
            return length, at + shift // 7 + 1
    return -1, at


def _behind_number(raw: bytes, at: int) -> int:
    """Behind the end of `raw` if the number is none."""
    return next((at + size for size, byte in enumerate(raw[at : at + 10], 1) if byte < 128), len(raw) + 1)


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
