"""Long fields of bytes: what the library makes of them, with fewer copies."""

from __future__ import annotations

import pytest

from colibri.v1 import experts_pb2 as pb
from service.wire import enclose


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 300_000])
def test_it_decodes_to_what_the_library_encodes(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    head = pb.ExpertResult(id=2**63, compute_ns=5, queue_ns=300)
    whole = pb.ExecuteResponse(result=pb.ExpertResult(id=2**63, data=data, compute_ns=5, queue_ns=300))
    assert pb.ExecuteResponse.FromString(enclose(2, head, 2, data)) == whole
    assert pb.ExecuteResponse.FromString(enclose(2, head, 2, bytearray(data))) == whole
