"""Long fields of bytes: what the library makes of them, with fewer copies."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings, strategies as st

from colibri.v1 import experts_pb2 as pb
from service.wire import disclose, enclose

LONG = bytes(range(256)) * 256
OUTER, FIELD = 2, 2  # ExecuteResponse.result, ExpertResult.data
NUMBER = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 300_000])
def test_it_decodes_to_what_the_library_encodes(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    head = pb.ExpertResult(id=2**63, compute_ns=5, queue_ns=300)
    whole = pb.ExecuteResponse(result=pb.ExpertResult(id=2**63, data=data, compute_ns=5, queue_ns=300))
    assert pb.ExecuteResponse.FromString(enclose(2, head, 2, data)) == whole
    assert pb.ExecuteResponse.FromString(enclose(2, head, 2, bytearray(data))) == whole


def varint(number: int, *, padding: int = 0) -> bytes:
    """padding: bytes that it takes too many."""
    out = bytearray()
    while number > 127 or padding:
        padding -= number <= 127
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def delimited(field: int, data: bytes, *, padding: int = 0) -> bytes:
    return varint(field << 3 | 2) + varint(len(data), padding=padding) + data


DATA = delimited(FIELD, LONG)
PARTS = st.one_of(
    st.builds(lambda field, number: varint(field << 3) + varint(number), st.integers(0, 40), NUMBER),
    st.builds(lambda field, data: varint(field << 3 | 1) + data, st.integers(1, 40), st.binary(min_size=8, max_size=8)),
    st.builds(lambda field, data: varint(field << 3 | 5) + data, st.integers(1, 40), st.binary(min_size=4, max_size=4)),
    st.builds(delimited, st.integers(1, 40), st.binary(max_size=200), padding=st.integers(0, 6)),
    st.builds(lambda field, inner: varint(field << 3 | 3) + inner + varint(field << 3 | 4), st.integers(1, 40), st.just(b"\x08\x01")),
    st.just(DATA),
    st.binary(max_size=12),  # garbage, mostly
)


def agrees(raw: bytes) -> bool:
    """With the library, in what was read or in that nothing was; whether the field was taken out."""
    rest, data = disclose(raw, OUTER, FIELD)
    try:
        whole = pb.ExecuteResponse.FromString(raw)
    except DecodeError:
        with pytest.raises(DecodeError):
            pb.ExecuteResponse.FromString(rest)
        return bool(data)
    read = pb.ExecuteResponse.FromString(rest)
    if data:
        assert not read.result.data
        read.result.data = bytes(data)
        whole, read = (pb.ExecuteResponse.FromString(m.SerializeToString(deterministic=True)) for m in (whole, read))
    assert read == whole
    return bool(data)


@given(number=NUMBER, compute=NUMBER, queue=NUMBER, size=st.integers(1 << 15, 1 << 16))
def test_it_discloses_what_was_enclosed(number: int, compute: int, queue: int, size: int) -> None:
    head = pb.ExpertResult(id=number, compute_ns=compute, queue_ns=queue)
    rest, data = disclose(enclose(OUTER, head, FIELD, LONG[:size]), OUTER, FIELD)
    assert pb.ExecuteResponse.FromString(rest) == pb.ExecuteResponse(result=head)
    assert data == LONG[:size]


@given(before=st.lists(PARTS, max_size=4), after=st.lists(PARTS, max_size=4), padding=st.integers(0, 6))
@example([varint(40 << 3 | 3)], [], 0)  # a group that does not end
@example([DATA], [], 0)  # twice: the last one counts
@example([b"\x80" * 11], [], 0)
@settings(max_examples=400)
def test_whatever_comes_means_what_the_library_says(before: list[bytes], after: list[bytes], padding: int) -> None:
    agrees(delimited(OUTER, b"".join([*before, DATA, *after]), padding=padding))


UNKNOWN = [b"\x7a\x03abc", b"\x29" + b"\xff" * 8, b"\x35" + b"\xff" * 4]  # of each wire type


@given(order=st.permutations([b"\x08\x07", b"\x18\x80\x01", b"\x20\x05", *UNKNOWN, DATA]))
def test_fields_come_in_any_order_and_may_be_unknown(order: list[bytes]) -> None:
    assert agrees(delimited(OUTER, b"".join(order)))


@given(cut=st.integers(0, len(DATA) + 20), more=st.binary(max_size=20))
def test_truncated_and_prolonged(cut: int, more: bytes) -> None:
    whole = delimited(OUTER, b"\x08\x07" + DATA + b"\x18\x05")
    agrees(whole[:cut])
    agrees(whole + more)


@given(at=st.integers(0, 12), byte=st.integers(0, 255), tail=st.booleans())
def test_a_wrong_byte(at: int, byte: int, tail: bool) -> None:
    raw = bytearray(delimited(OUTER, b"\x08\x07" + DATA + b"\x18\x05\x20\x09"))
    raw[-1 - at if tail else at] = byte
    agrees(bytes(raw))


def test_two_results_in_one_message_are_left_to_the_library() -> None:
    raw = delimited(OUTER, b"\x08\x07") + delimited(OUTER, DATA)
    assert not agrees(raw)
    assert not agrees(delimited(OUTER, DATA) + delimited(3, b"\x08\x07"))
