"""Experts.Forward and Execute of a server against the float64 reference, and bit by bit against each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from colibri.v1 import experts_pb2 as pb, experts_pb2_grpc
from ops.random_model import ModelShape, make_model
from tests.golden import harness, reference
from tests.integration.serving import PATIENCE, serving

SHAPE = ModelShape(layers=2, hidden=72, heads=4, kv_heads=2, ffn=40, experts=12, top_k=3, vocab=64)
WEIGHS_INPUT = ModelShape(
    layers=2, hidden=72, heads=4, kv_heads=2, ffn=40, experts=12, top_k=3, vocab=64, router={"score": "sigmoid", "apply_at": "input"}
)
FORMATS = ("f32", "bf16", "int8", "int4")
# In units of max|out|, for rows that are exact in what they are sent in. f32: float32 rounding. The others round an expert's inner
# activations too, and one on a boundary may fall the other way (test_parity_random): a step of the format, of one of 40.
BOUND = {"f32": 3e-6, "bf16": 4e-3, "int8": 1e-2, "int4": 2e-2}
ROWS = 90  # more than one piece

F32 = NDArray[np.float32]


class Caller:
    """Asks a server, as a program with its own attention does."""

    def __init__(self, channel: grpc.Channel, path: Path, hidden: int) -> None:
        self.stub = experts_pb2_grpc.ExpertsStub(channel)
        self.model = reference.from_container(path)
        self.hidden = hidden

    def forward(self, layer: int, x: NDArray[np.generic], dtype: pb.DataType) -> pb.ForwardResponse:
        tensor = pb.Tensor(dtype=dtype, shape=x.shape, data=x.tobytes())
        return self.stub.Forward(pb.ForwardRequest(layer=layer, hidden=tensor), timeout=PATIENCE)

    def execute(self, batch: pb.ExpertBatch) -> F32:
        """F32 [pairs or rows, hidden]."""
        requests = iter([pb.ExecuteRequest(open=pb.OpenStream(front_end="test")), pb.ExecuteRequest(batch=batch)])
        _, answer = self.stub.Execute(requests, timeout=PATIENCE)
        assert answer.HasField("result"), answer
        return np.frombuffer(answer.result.data, np.float32).reshape(-1, self.hidden)


@pytest.fixture(scope="module", params=FORMATS)
def quant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["output", "input"])
def caller(request: pytest.FixtureRequest, quant: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    path = tmp_path_factory.mktemp("served") / "model.colibri"
    shape = WEIGHS_INPUT if request.param == "input" else SHAPE
    make_model(path, shape, quant=quant, seed=11)
    with serving(path, experts_api=True) as server, grpc.insecure_channel(server.target) as channel:
        yield Caller(channel, path, shape.hidden)


def rows(seed: int) -> F32:
    """Exact in bf16, so that either dtype sends the same numbers."""
    x = np.random.default_rng(seed).standard_normal((ROWS, SHAPE.hidden), np.float32)
    return (x.view(np.uint32) >> 16 << 16).view(np.float32)


def array(tensor: pb.Tensor, dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.frombuffer(tensor.data, dtype).reshape(tuple(tensor.shape))


def as_bf16(x: F32) -> NDArray[np.uint16]:
    """Rounded to the nearest, ties to even; there is no NaN in it."""
    return (reference.round_to("bf16", x.astype(np.float64)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("layer", [0, 1])
def test_forward_is_the_references_block(caller: Caller, quant: str, layer: int) -> None:
    x = rows(layer)
    expected, ids, weights, gap = reference.block(caller.model, layer, x.astype(np.float64))
    assert gap > 1e-5, "no near ties, or another choice would be as right"
    exact = caller.forward(layer, x, pb.DATA_TYPE_F32)
    np.testing.assert_array_equal(array(exact.experts, np.int32), ids)
    np.testing.assert_allclose(array(exact.weights, np.float32), weights, atol=harness.WEIGHT_BOUND)
    assert harness.distance(array(exact.hidden, np.float32), expected) < BOUND[quant]
    short = caller.forward(layer, as_bf16(x), pb.DATA_TYPE_BF16)
    assert (short.experts, short.weights) == (exact.experts, exact.weights)
    assert short.hidden.data == as_bf16(array(exact.hidden, np.float32)).tobytes(), "the F32 answer, rounded"


@pytest.mark.parametrize("dtype", [pb.DATA_TYPE_F32, pb.DATA_TYPE_BF16])
def test_execute_with_forwards_experts_and_weights_gives_its_bits(caller: Caller, dtype: pb.DataType) -> None:
    x = rows(3)
    sent = x if dtype == pb.DATA_TYPE_F32 else as_bf16(x)
    answer = caller.forward(1, x, pb.DATA_TYPE_F32)
    batch, weights = batch_of(answer, sent, dtype)
    weighs_input = caller.model.router.get("apply_at") == "input"
    if weighs_input:
        batch.input_weights, batch.weights = weights.tobytes(), np.ones_like(weights).tobytes()
    else:
        batch.weights = weights.tobytes()
    assert caller.execute(batch).tobytes() == answer.hidden.data
    batch.weights = b""
    numbers, outputs = np.frombuffer(batch.row_of_pair, np.int32), caller.execute(batch)
    total, factors = np.zeros_like(x), np.ones_like(weights) if weighs_input else weights
    for pair, row in enumerate(numbers):  # ascending by expert within each row
        total[row] += factors[pair] * outputs[pair]
    assert total.tobytes() == answer.hidden.data


def batch_of(answer: pb.ForwardResponse, sent: NDArray[np.generic], dtype: pb.DataType) -> tuple[pb.ExpertBatch, F32]:
    """The pairs that Forward chose, expert by expert, rows ascending; and their weights."""
    ids, weights = array(answer.experts, np.int32), array(answer.weights, np.float32)
    order = np.argsort(ids.reshape(-1), kind="stable")
    experts, counts = np.unique(ids, return_counts=True)
    batch = pb.ExpertBatch(
        id=1,
        layer=1,
        experts=experts.tolist(),
        counts=counts.tolist(),
        dtype=dtype,
        rows=len(sent),
        data=sent.tobytes(),
        row_of_pair=(order // ids.shape[1]).astype(np.int32).tobytes(),
    )
    return batch, weights.reshape(-1)[order].astype(np.float32)
