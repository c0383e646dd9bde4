"""How long it takes to make another loaded model the default of a serving server, at rest and while streams run."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from colibri.v1 import inference_pb2, operator_pb2 as pb, operator_pb2_grpc
from ops.bench.measure import BenchError, Row
from ops.bench.served import serving
from ops.bench.steps import BenchConfig
from service.client import Client, generate_request

_FIRST, _SECOND = "first", "second"
_PATIENCE = 300.0  # seconds for a load
_ANSWER = 4096  # tokens of the streams that run meanwhile: more than they get to
_PROMPT = tuple(range(3, 35))
_PAUSE = 0.05  # seconds between swaps


@dataclass(slots=True)
class _Server:
    """Two models behind one address."""

    target: str
    operator: operator_pb2_grpc.OperatorStub
    context: int

    def swap(self, name: str) -> tuple[float, float]:
        """Milliseconds: from the call to the new default being able to take a step, and the whole call as its caller sees it."""
        begin = time.perf_counter()
        response = self.operator.SwapModel(pb.SwapModelRequest(name=name), timeout=_PATIENCE)
        return response.swap_ms, (time.perf_counter() - begin) * 1e3


def bench_swap(path: Path, other: Path, config: BenchConfig, *, streams: int) -> list[Row]:
    """Milliseconds. BenchError if a stream fails or the wrong model answers."""
    with _server(path, other, config) as server, Client(server.target, timeout=_PATIENCE) as client:
        rest = [server.swap(name) for _ in range(config.samples) for name in (_SECOND, _FIRST)]
        first = tuple(_to_first_token(server, client, name) for _ in range(config.samples) for name in (_SECOND, _FIRST))
        load = _under_load(server, config.samples, streams)
    return [
        Row("swap", "ms", tuple(own for own, _ in rest)),
        Row("swap, the whole call", "ms", tuple(whole for _, whole in rest)),
        Row("swap and the new default's first token", "ms", first, {"prompt": len(_PROMPT)}),
        # The first swaps away from the model that is busy, to one at rest, and back, at the end of a step that runs.
        Row(f"swap away from {streams} streams", "ms", tuple(own for own, _ in load[::2]), {"streams": streams}),
        Row(f"swap back to {streams} streams", "ms", tuple(own for own, _ in load[1::2]), {"streams": streams}),
        Row(f"swap away from {streams} streams, the whole call", "ms", tuple(whole for _, whole in load[::2]), {"streams": streams}),
    ]


@contextmanager
def _server(path: Path, other: Path, config: BenchConfig) -> Iterator[_Server]:
    with tempfile.TemporaryDirectory(prefix="colibri-swap-") as folder:
        socket = Path(folder) / "operators.sock"
        options = ["--name", _FIRST, "--operator-socket", str(socket), "--kv-memory", "256MiB"]
        with serving(path, config, options=options) as served, grpc.insecure_channel(f"unix:{socket}") as channel:
            operator = operator_pb2_grpc.OperatorStub(channel)
            request = pb.LoadModelRequest(path=str(other.absolute()), name=_SECOND)
            operator.LoadModel(request, wait_for_ready=True, timeout=_PATIENCE)
            with Client(served.target, timeout=_PATIENCE) as client:
                context = min(model.max_context for model in client.models())
                for name in (_FIRST, _SECOND):  # pages that were never touched are no part of a swap
                    client.complete(_request(name, 4))
            yield _Server(served.target, operator, context)


def _request(model: str, tokens: int) -> inference_pb2.GenerateRequest:
    return generate_request(tokens=[token % 256 for token in _PROMPT], model=model, max_tokens=tokens, temperature=0, ignore_eos=True)


def _to_first_token(server: _Server, client: Client, name: str) -> float:
    begin = time.perf_counter()
    server.swap(name)
    answer = client.complete(_request("", 1))
    taken = (time.perf_counter() - begin) * 1e3
    if answer.finish.model != name:
        raise BenchError(f"{answer.finish.model} answered after the swap to {name}")
    return taken


def _under_load(server: _Server, samples: int, streams: int) -> list[tuple[float, float]]:
    """Swaps away from the model that the streams run on, and back."""
    stop = threading.Event()
    errors: list[grpc.RpcError] = []
    began = [threading.Event() for _ in range(streams)]

    def stream(place: int) -> None:
        try:
            with Client(server.target, timeout=_PATIENCE) as client:
                while not stop.is_set():
                    for _ in client.generate(_request(_FIRST, min(_ANSWER, server.context - len(_PROMPT)))):
                        began[place].set()
                        if stop.is_set():
                            break
        except grpc.RpcError as error:
            errors.append(error)
        finally:
            began[place].set()

    threads = [threading.Thread(target=stream, args=(place,)) for place in range(streams)]
    for thread in threads:
        thread.start()
    try:
        if not all(event.wait(_PATIENCE) for event in began):
            raise BenchError("the streams did not begin")
        taken = []
        for _ in range(samples):
            for name in (_SECOND, _FIRST):
                time.sleep(_PAUSE)
                taken.append(server.swap(name))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise BenchError(f"{len(errors)} streams failed while models were swapped: {errors[0]}")
    return taken
