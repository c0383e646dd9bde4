"""Batches that say impossible things over the right protocol: refused one by one, the stream and the node go on."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from colibri.v1 import experts_pb2 as pb, experts_pb2_grpc
from service.client import Client, generate_request
from tests.fault.harness import limit
from tests.multinode.net import Network
from tests.multinode.nodes import Node, nodes_of

pytestmark = pytest.mark.multinode
HIDDEN = 128
LONGEST = 1_000_000
EXECUTE = "/colibri.v1.Experts/Execute"


@pytest.fixture(scope="module")
def node(network: Network, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with nodes_of(network, tmp_path_factory.mktemp("execute")) as made:
        yield made.node("n1", "--share", "1/1", model=small_model, MAX_MESSAGE_BYTES=str(LONGEST))


def batch(**changes: object) -> pb.ExecuteRequest:
    """Two rows for experts 1 and 2, with some fields changed."""
    rows = np.linspace(-1, 1, 2 * HIDDEN, dtype=np.float32)
    fields = {"id": 1, "layer": 1, "experts": [1, 2], "counts": [1, 1], "dtype": pb.DATA_TYPE_F32, "rows": 2, "data": rows.tobytes()}
    return pb.ExecuteRequest(batch=pb.ExpertBatch(**(fields | changes)))


def execute(node: Node, *requests: pb.ExecuteRequest) -> list[pb.ExecuteResponse]:
    with grpc.insecure_channel(node.target) as channel:
        opening = pb.ExecuteRequest(open=pb.OpenStream(front_end="test"))
        return list(experts_pb2_grpc.ExpertsStub(channel).Execute(iter([opening, *requests]), timeout=limit(10)))


IMPOSSIBLE = {  # beside what tests/integration/test_node.py has
    "counts that wrap around": {"counts": [2**32 - 1, 3]},
    "no rows": {"rows": 0, "data": b"", "counts": [0, 0]},
    "bytes too many": {"data": bytes(2 * HIDDEN * 4 + 1)},
    "rows beyond bytes": {"rows": 2**31},
    "a row index below zero": {"row_of_pair": struct.pack("2i", 0, -1)},
    "half a row index": {"row_of_pair": bytes(7)},
    "an answer beyond all bounds": {"counts": [2**20, 2**20]},
    "a data type of tomorrow": {"dtype": 77},
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_impossible_batch_is_refused_and_the_stream_goes_on(node: Node, what: str) -> None:
    answers = execute(node, batch(id=1), batch(id=2, **IMPOSSIBLE[what]), batch(id=3))
    results = {answer.result.id: answer.result.data for answer in answers if answer.HasField("result")}
    failed = {answer.failed.id: answer.failed for answer in answers if answer.HasField("failed")}
    assert set(results) == {1, 3}
    assert results[1] == results[3] != b""
    assert failed[2].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_infinite_and_undefined_rows_are_computed(node: Node) -> None:
    rows = np.full((2, HIDDEN), np.nan, np.float32)
    rows[1] = np.inf
    answers = execute(node, batch(data=rows.tobytes()), batch(id=2))
    assert {answer.result.id for answer in answers if answer.HasField("result")} == {1, 2}


@pytest.mark.parametrize("first", [b"", b"\xff" * 1000, bytes(1 << 20), b"\x0a\xff\xff\xff\xff\x07"])
def test_bytes_that_are_no_request(node: Node, first: bytes) -> None:
    with grpc.insecure_channel(node.target) as channel, pytest.raises(grpc.RpcError):
        list(channel.stream_stream(EXECUTE)(iter([first]), timeout=limit(5)))
    assert len(execute(node, batch())) == 2


def test_hundreds_of_streams_that_say_nothing(node: Node) -> None:
    with grpc.insecure_channel(node.target) as channel:
        calls = [channel.stream_stream(EXECUTE)(iter([]), timeout=limit(20)) for _ in range(300)]
        assert len(execute(node, batch())) == 2
        for call in calls:
            call.cancel()
    assert len(execute(node, batch())) == 2


def test_message_beyond_the_limit_ends_the_stream_and_says_both_sizes(node: Node) -> None:
    with pytest.raises(grpc.RpcError) as ended:
        execute(node, batch(data=bytes(2 * LONGEST)))
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"vs. {LONGEST}" in str(ended.value.details())
    assert len(execute(node, batch())) == 2


def test_front_end_names_the_setting_that_a_batch_is_too_long_for(network: Network, small_model: Path, tmp_path: Path) -> None:
    """It computes such a batch by itself, if it may."""
    with nodes_of(network, tmp_path) as made:
        node = made.node("narrow", "--share", "1/1", model=small_model, wait=False, MAX_MESSAGE_BYTES="5000")
        front = made.front([node.place], model=small_model)
        front.wait_nodes("narrow")
        with Client(front.target, timeout=limit(20)) as client:
            client.complete(generate_request(tokens=list(range(3, 203)), max_tokens=1))
        front.wait_says("a batch is too long for it", "5000", "max_message_bytes", seconds=5)
