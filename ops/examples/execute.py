# Copyright the Colibri authors. Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Experts.Execute from a program that has a router of its own: mini-batches of experts over one stream, of a server or a node.

colibri serve tiny --experts-api
python ops/examples/execute.py localhost:50051
"""

from __future__ import annotations

import argparse
import itertools
import queue
import sys

import grpc
import numpy as np
import numpy.typing as npt

from colibri.v1 import experts_pb2 as pb, experts_pb2_grpc, node_pb2

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class Experts:
    """One stream. Opened once, used for every layer of every step."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outgoing: queue.SimpleQueue[pb.ExecuteRequest | None] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._answers = experts_pb2_grpc.ExpertsStub(channel).Execute(iter(self._outgoing.get, None))
        self._outgoing.put(pb.ExecuteRequest(open=pb.OpenStream(front_end="execute.py")))
        self.opened: node_pb2.NodeDescription = next(self._answers).opened

    def run(self, layer: int, normed: F32, ids: I32, weights: F32) -> F32:
        """What a layer's block of experts gives for normed rows [T, hidden] whose router chose ids with weights [T, k]."""
        order = np.argsort(ids.reshape(-1), kind="stable")  # pairs by expert, rows ascending
        experts, counts = np.unique(ids, return_counts=True)
        batch = pb.ExpertBatch(
            id=next(self._ids),
            layer=layer,
            experts=experts.tolist(),
            counts=counts.tolist(),
            dtype=pb.DATA_TYPE_F32,
            rows=len(normed),
            data=normed.astype("<f4").tobytes(),
            row_of_pair=(order // ids.shape[1]).astype("<i4").tobytes(),
            weights=weights.reshape(-1)[order].astype("<f4").tobytes(),
        )
        self._outgoing.put(pb.ExecuteRequest(batch=batch))
        answer = next(self._answers)
        if answer.HasField("failed"):
            raise RuntimeError(f"batch {answer.failed.id}: {answer.failed.message}")
        return np.frombuffer(answer.result.data, "<f4").reshape(normed.shape)

    def close(self) -> None:
        """Says that nothing more comes."""
        self._outgoing.put(None)


def main(target: str) -> None:
    """A router of chance: four rows, two experts each."""
    random = np.random.default_rng(0)
    with grpc.insecure_channel(target) as channel:
        experts = Experts(channel)
        model = experts.opened
        print(f"{model.model}: {model.layers} layers of {model.experts} experts, {model.expert_format}")
        normed = random.standard_normal((4, model.hidden), np.float32)
        for layer in range(model.layers):
            ids = np.array([random.choice(model.experts, 2, replace=False) for _ in normed], np.int32)
            out = experts.run(layer, normed, ids, np.full(ids.shape, 0.5, np.float32))
            print(f"layer {layer}: |out| = {np.linalg.norm(out):.4f}")
        experts.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="localhost:50051", help="HOST:PORT of a server or a node (localhost:50051)")
    try:
        main(parser.parse_args().target)
    except grpc.RpcError as error:
        sys.exit(f"execute.py: {error.code().name}: {error.details()}")
    except RuntimeError as error:
        sys.exit(f"execute.py: {error}")
