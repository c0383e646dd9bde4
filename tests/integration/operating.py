"""An operator of a server under test, and streams to disturb meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from colibri.v1 import inference_pb2 as pb, operator_pb2 as op, operator_pb2_grpc
from service.client import Client, generate_request
from tests.integration.serving import PATIENCE, Serving, serving

STREAMS = 8


@dataclass
class Operating:
    """A server in this process whose workers are real processes, and an operator of it."""

    serving: Serving
    socket: Path
    stub: operator_pb2_grpc.OperatorStub

    def workers(self, model: str = "") -> list[op.Worker]:
        return list(self.stub.ListWorkers(op.ListWorkersRequest(model=model), timeout=PATIENCE).workers)

    def models(self) -> dict[str, op.LoadedModel]:
        response = self.stub.ListLoadedModels(op.ListLoadedModelsRequest(), timeout=PATIENCE)
        return {model.name: model for model in response.models}

    def load(self, path: Path, name: str, **how: object) -> op.LoadedModel:
        request = op.LoadModelRequest(path=str(path), name=name, kv_memory=16 << 20, **how)  # type: ignore[arg-type]
        return self.stub.LoadModel(request, timeout=PATIENCE).model

    def swap(self, name: str) -> op.SwapModelResponse:
        return self.stub.SwapModel(op.SwapModelRequest(name=name), timeout=PATIENCE)

    def scale(self, workers: int | None, *, node: int | None = 0, threads: int | None = None) -> list[op.Worker]:
        request = op.ScaleWorkersRequest(node=node, workers=workers, threads=threads)
        return list(self.stub.ScaleWorkers(request, timeout=PATIENCE).workers)


@contextlib.contextmanager
def operating(model: Path, folder: Path, **settings: object) -> Iterator[Operating]:
    """A server with one worker, unless told otherwise, and its operators' socket in `folder`."""
    socket = folder / "operators.sock"
    wish = {"workers_per_node": 1, "threads_per_worker": 1, "operator_socket": str(socket)} | settings
    with serving(model, **wish) as server, grpc.insecure_channel(f"unix:{socket}") as channel:
        yield Operating(server, socket, operator_pb2_grpc.OperatorStub(channel))


@dataclass
class Streams:
    """STREAMS greedy answers at once, each read in a thread of its own to its end."""

    target: str
    tokens: int
    model: str = ""
    answers: list[list[int]] = field(default_factory=list)
    finishes: list[pb.Finish] = field(default_factory=list)
    errors: list[grpc.RpcError] = field(default_factory=list)
    _threads: Sequence[threading.Thread] = ()

    def start(self) -> None:
        """Returns when each has its first tokens."""
        self.answers = [[] for _ in range(STREAMS)]
        began = [threading.Event() for _ in range(STREAMS)]
        self._threads = [threading.Thread(target=self._read, args=(place, began[place])) for place in range(STREAMS)]
        for thread in self._threads:
            thread.start()
        assert all(event.wait(PATIENCE) for event in began)

    def join(self) -> list[list[int]]:
        """The tokens of every answer."""
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive()
        return self.answers

    def _read(self, place: int, began: threading.Event) -> None:
        request = generate_request(
            tokens=list(range(3 + place, 12 + place)), model=self.model, max_tokens=self.tokens, temperature=0, ignore_eos=True
        )
        try:
            with Client(self.target, timeout=2 * PATIENCE) as client:
                for event in client.generate(request):
                    if isinstance(event, pb.Delta):
                        self.answers[place] += event.token_ids
                        began.set()
                    else:
                        self.finishes.append(event)
        except grpc.RpcError as error:
            self.errors.append(error)
        finally:
            began.set()


def undisturbed(server: Serving, tokens: int, *, model: str = "") -> list[list[int]]:
    """What the answers are when nothing happens meanwhile."""
    streams = Streams(server.target, tokens, model)
    streams.start()
    answers = streams.join()
    assert not streams.errors
    assert [len(answer) for answer in answers] == [tokens] * STREAMS
    return answers
