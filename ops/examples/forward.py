# Copyright the Colibri authors. Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Experts.Forward from a program that runs attention itself: the experts of one layer after the other for a few hidden states.

colibri serve tiny --experts-api
python ops/examples/forward.py localhost:50051
"""

from __future__ import annotations

import argparse
import sys

import grpc
import numpy as np
import numpy.typing as npt

from colibri.v1 import experts_pb2 as pb, experts_pb2_grpc, inference_pb2, inference_pb2_grpc

PROMPT = "In the beginning"


def forward(stub: experts_pb2_grpc.ExpertsStub, layer: int, normed: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """What the layer's block of experts gives for normed hidden states [T, hidden], to be added to the residual."""
    tensor = pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=normed.shape, data=normed.astype("<f4").tobytes())
    answer = stub.Forward(pb.ForwardRequest(layer=layer, hidden=tensor), timeout=30)
    return np.frombuffer(answer.hidden.data, "<f4").reshape(tuple(answer.hidden.shape))


def main(target: str) -> None:
    """A caller's own loop: where `attend` would be, this one has only the residual and a norm."""
    with grpc.insecure_channel(target) as channel:
        model = inference_pb2_grpc.InferenceStub(channel).GetModel(inference_pb2.GetModelRequest(), timeout=30).model
        stub = experts_pb2_grpc.ExpertsStub(channel)
        layers = stub.Route(pb.RouteRequest(text=PROMPT), timeout=30).layers
        x = np.random.default_rng(0).standard_normal((4, model.hidden_size), np.float32)
        for layer in layers:
            normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
            x = x + forward(stub, layer, normed)
            print(f"layer {layer}: |x| = {np.linalg.norm(x):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="localhost:50051", help="HOST:PORT of a server (localhost:50051)")
    try:
        main(parser.parse_args().target)
    except grpc.RpcError as error:
        sys.exit(f"forward.py: {error.code().name}: {error.details()}")
