"""Something that says it is a node and answers nonsense: `python -m tests.multinode.impostor DESCRIPTION WORD...`.

DESCRIPTION is a file with what it says it is. Each stream goes by the next of the words, over and over, and the output has the word.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np

from colibri.v1 import experts_pb2 as pb, node_pb2
from tests.multinode.processes import PORT

Said = Iterator[bytes]
ESCAPES = "\r\n2026-01-01 ERROR all is lost\x1b[2J\x1b]0;title\x07\x9b31m\u202e"
"""What a terminal would obey, and a log take for a line of its own."""


def _result(number: int, data: bytes) -> bytes:
    return pb.ExecuteResponse(result=pb.ExpertResult(id=number, data=data)).SerializeToString()


def _failed(number: int, message: str = "no " * 1000) -> bytes:
    return pb.ExecuteResponse(failed=pb.BatchFailure(id=number, code=3, message=message)).SerializeToString()


def _right_size(batch: pb.ExpertBatch, hidden: int) -> bytes:
    return bytes(4 * hidden * sum(batch.counts))


def _other_model(description: node_pb2.NodeDescription) -> bytes:
    changed = node_pb2.NodeDescription(model_digest="0" * 64)
    changed.shares.add(layer=99, experts=[4_000_000_000])
    description = node_pb2.NodeDescription.FromString(description.SerializeToString())
    description.MergeFrom(changed)
    return pb.ExecuteResponse(opened=description).SerializeToString()


NONSENSE: dict[str, Callable[[pb.ExpertBatch, node_pb2.NodeDescription], Said]] = {
    "too short": lambda batch, me: iter([_result(batch.id, bytes(4))]),
    "too long": lambda batch, me: iter([_result(batch.id, _right_size(batch, me.hidden) + bytes(4))]),
    "empty": lambda batch, me: iter([_result(batch.id, b"")]),
    "unknown": lambda batch, me: iter([_result(batch.id + 10_000_000, _right_size(batch, me.hidden)), _failed(2**64 - 1)]),
    "earlier": lambda batch, me: iter([_result(max(batch.id - 1, 0), _right_size(batch, me.hidden)), _failed(0)]),
    "failed": lambda batch, me: iter([_failed(batch.id)]),
    "escapes": lambda batch, me: iter([_failed(batch.id, ESCAPES)]),
    "no message": lambda batch, me: iter([b"\xff\xff\xff\xff"]),
    "no kind": lambda batch, me: iter([b""] * 100 + [_failed(batch.id)]),
    "other model": lambda batch, me: iter([_other_model(me)]),
    "many": lambda batch, me: iter([_result(i, b"1234") for i in range(batch.id - 500, batch.id + 500)]),
    "nan": lambda batch, me: iter([_result(batch.id, np.full(me.hidden * sum(batch.counts), np.nan, np.float32).tobytes())]),
}


class Impostor:
    """Answers as a node's server does, in form."""

    def __init__(self, description: node_pb2.NodeDescription, words: list[str]) -> None:
        self._description = description
        self._words = itertools.cycle(words)

    def server(self) -> grpc.Server:
        """That speaks so, without an address yet."""
        server = grpc.server(ThreadPoolExecutor(20))
        execute = grpc.stream_stream_rpc_method_handler(self.execute, pb.ExecuteRequest.FromString, None)
        server.add_registered_method_handlers("colibri.v1.Experts", {"Execute": execute})
        server.add_registered_method_handlers("colibri.v1.Node", {"Describe": grpc.unary_unary_rpc_method_handler(self.describe)})
        return server

    def describe(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return self._description.SerializeToString()

    def execute(self, requests: Iterator[pb.ExecuteRequest], context: grpc.ServicerContext) -> Said:
        next(requests)
        yield pb.ExecuteResponse(opened=self._description).SerializeToString()
        word = ""
        for request in requests:
            if not word:
                word = next(self._words)
                print(word, flush=True)
            if word == "ends":
                return
            if word == "aborts":
                context.abort(grpc.StatusCode.INTERNAL, ESCAPES + "x" * 4000)
            yield from NONSENSE[word](request.batch, self._description)


def main() -> None:
    """Serves until it is killed."""
    description = node_pb2.NodeDescription.FromString(Path(sys.argv[1]).read_bytes())
    impostor = Impostor(description, sys.argv[2:])
    server = impostor.server()
    server.add_insecure_port(f"0.0.0.0:{PORT}")
    server.start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
