"""Experts.Forward over gRPC: a layer's block of experts on a caller's own rows, and each thing that can be wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from colibri.v1 import experts_pb2 as pb, experts_pb2_grpc
from service.client import generate_request
from tests.integration.serving import PATIENCE, Serving, serving

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Serving]:
    with serving(tiny_model, experts_api=True, max_rows=48, max_seqs=8) as running:
        yield running


@pytest.fixture
def stub(server: Serving) -> Iterator[experts_pb2_grpc.ExpertsStub]:
    with grpc.insecure_channel(server.target) as channel:
        yield experts_pb2_grpc.ExpertsStub(channel)


def rows(server: Serving, count: int, seed: int = 1) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, server.server.default.model.info.hidden), np.float32)


def request(x: npt.NDArray[np.float32], layer: int = 0) -> pb.ForwardRequest:
    return pb.ForwardRequest(layer=layer, hidden=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=x.shape, data=x.tobytes()))


def array(tensor: pb.Tensor, dtype: type[np.generic] = np.float32) -> npt.NDArray[np.generic]:
    return np.frombuffer(tensor.data, dtype).reshape(tuple(tensor.shape))


def test_each_row_has_the_same_bits_alone_and_among_others_in_pieces(server: Serving, stub: experts_pb2_grpc.ExpertsStub) -> None:
    x = rows(server, 130)
    together = stub.Forward(request(x, 1), timeout=PATIENCE)
    assert list(together.hidden.shape) == list(x.shape)
    assert np.abs(array(together.hidden)).max() > 1e-3
    np.testing.assert_allclose(array(together.weights).sum(axis=1), 1, rtol=1e-6)
    for row in (0, 47, 48, 129):
        alone = stub.Forward(request(x[row : row + 1], 1), timeout=PATIENCE)
        assert alone.hidden.data == array(together.hidden)[row].tobytes()
        assert alone.experts.data == array(together.experts, np.int32)[row].tobytes()
        assert alone.weights.data == array(together.weights)[row].tobytes()
    assert (array(stub.Forward(request(x, 0), timeout=PATIENCE).hidden) != array(together.hidden)).any(), "layers differ"


def test_bf16_rows_are_answered_in_bf16(server: Serving, stub: experts_pb2_grpc.ExpertsStub) -> None:
    bits = (rows(server, 5).view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    asked = pb.ForwardRequest(layer=0, hidden=pb.Tensor(dtype=pb.DATA_TYPE_BF16, shape=bits.shape, data=bits.tobytes()))
    rounded, whole = stub.Forward(asked, timeout=PATIENCE), stub.Forward(request(exact), timeout=PATIENCE)
    assert rounded.experts == whole.experts
    back = (array(rounded.hidden, np.uint16).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(back, array(whole.hidden), rtol=2**-8)


def wrong(server: Serving) -> dict[str, pb.ForwardRequest]:
    good = request(rows(server, 3))
    cases: dict[str, pb.ForwardRequest] = {}
    for words, change in {
        "layer: is 99": {"layer": 99},
        "hidden.dtype: is DATA_TYPE_I32": {"dtype": pb.DATA_TYPE_I32},
        "hidden.dtype: is DATA_TYPE_UNSPECIFIED": {"dtype": 0},
        "hidden.shape: is [3]": {"shape": [3]},
        "at least one row": {"shape": [0, server.server.default.model.info.hidden], "data": b""},
        "hidden.data: has 12 bytes": {"data": b"twelve bytes"},
    }.items():
        case = cases[words] = pb.ForwardRequest()
        case.CopyFrom(good)
        case.layer = int(change.get("layer", 0))  # type: ignore[call-overload]
        for name in change.keys() & {"dtype", "data"}:
            setattr(case.hidden, name, change[name])
        if "shape" in change:
            case.hidden.shape[:] = change["shape"]
    x = rows(server, 4)
    x[1, 3], x[3, 0] = np.nan, np.inf
    return cases | {"NaN or infinite elements in row 1, 3": request(x)}


def test_whatever_is_wrong_is_named(server: Serving, stub: experts_pb2_grpc.ExpertsStub) -> None:
    for words, case in wrong(server).items():
        with pytest.raises(grpc.RpcError) as refused:
            stub.Forward(case, timeout=PATIENCE)
        assert refused.value.code() is INVALID, words
        assert words in refused.value.details(), refused.value.details()


def test_tokens_stay_as_they_are_beside_a_flood_of_calls(server: Serving, stub: experts_pb2_grpc.ExpertsStub) -> None:
    asked = generate_request("a", max_tokens=48, ignore_eos=True, seed=3)
    alone, x = server.client.complete(asked), rows(server, 32)
    expected = stub.Forward(request(x), timeout=PATIENCE)
    with ThreadPoolExecutor(8) as pool:
        flood = [pool.submit(stub.Forward, request(x), timeout=PATIENCE) for _ in range(200)]
        beside = server.client.complete(asked)
        assert all(answer.result() == expected for answer in flood)
    assert beside.text == alone.text
    server.wait_idle()


def test_a_server_that_keeps_no_experts_by_themselves_says_how_to(tiny_model: Path) -> None:
    with (
        serving(tiny_model) as other,
        grpc.insecure_channel(other.target) as channel,
        pytest.raises(grpc.RpcError, match="--experts-api"),
    ):
        experts_pb2_grpc.ExpertsStub(channel).Forward(request(rows(other, 1)), timeout=PATIENCE)
