"""Experts.Execute on a server: a caller's mini-batches one after the other, in pieces between the steps of everybody else."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from importlib.metadata import version

from google.rpc.code_pb2 import Code

from colibri.v1 import experts_pb2 as pb, node_pb2
from engine_c import FORMATS, EngineError, isa_name
from engine_c.remote import ExpertBatch
from service.calls import Context, aside
from service.experts_forward import PIECE_ROWS
from service.faults import Draining, QueueFull, StreamMisfit
from service.hosted import Hosted
from service.node import hello
from service.node.batches import BatchError, Kind, Work, check
from service.node.hello import StreamRefused, batch_of, check_opening, failure_code, never_opened
from service.wire import PROTOCOL

_FORMAT_NAMES = {number: name for name, number in FORMATS.items()}


async def await_opening(requests: AsyncIterator[pb.ExecuteRequest]) -> pb.ExecuteRequest | None:
    """A stream's first message, an empty one if there is none; None if nothing comes in time."""
    try:
        async with asyncio.timeout(hello.OPENING_S):
            return await anext(aiter(requests), pb.ExecuteRequest())
    except TimeoutError:
        return None


class Execution:
    """One caller's stream. `run` is its whole life."""

    def __init__(self, hosted: Hosted, context: Context, *, largest: int) -> None:
        """largest: bytes that an answer may have."""
        self._hosted = hosted
        self._context = context
        self._largest = largest
        self._prepared = False
        info, routed = hosted.model.info, hosted.model.artifact.routed_layers
        self._experts_of = tuple(info.experts if layer in routed else 1 for layer in range(info.layers))

    async def run(self, opening: pb.ExecuteRequest | None, requests: AsyncIterator[pb.ExecuteRequest]) -> None:
        """Answers until the caller has asked for all it wants. opening: as await_opening gave it. Raises the Fault that ends the stream."""
        try:
            if opening is None:
                raise never_opened()
            digest = self._hosted.model.artifact.digest
            self._prepared = check_opening(opening, model=opening.open.model, digest=digest, here="this server")
            if opening.open.kv_blocks:
                raise StreamRefused("FAILED_PRECONDITION", "NO_LAYERS", "kv_blocks: this server runs no layers for others; ask a node")
            await self._context.write(pb.ExecuteResponse(opened=_describe(self._hosted, digest)))
            while (request := await self._next(requests)) is not None:
                await self._context.write(await self._answer(batch_of(request)))
        except StreamRefused as refused:
            raise StreamMisfit(refused.code, refused.reason, str(refused)) from refused

    async def _next(self, requests: AsyncIterator[pb.ExecuteRequest]) -> pb.ExecuteRequest | None:
        """What the caller sends next; None at the end. Draining if nothing has come when the server, or the model, goes."""
        coming = asyncio.ensure_future(anext(aiter(requests), None))
        going = asyncio.ensure_future(self._hosted.desk.going.wait())
        try:
            await asyncio.wait((coming, going), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise Draining
            return coming.result()
        finally:
            going.cancel()
            coming.cancel()

    async def _answer(self, message: pb.ExpertBatch) -> pb.ExecuteResponse:
        try:
            return pb.ExecuteResponse(result=await self._result(message))
        except BatchError as error:
            code, sentence = Code.INVALID_ARGUMENT, str(error)
        except QueueFull as full:
            code, sentence = Code.RESOURCE_EXHAUSTED, str(full)
        except EngineError as error:
            code, sentence = failure_code(error), str(error)
        return pb.ExecuteResponse(failed=pb.BatchFailure(id=message.id, code=code, message=sentence))

    async def _result(self, message: pb.ExpertBatch) -> pb.ExpertResult:
        """BatchError, EngineError, or the Fault that says why nothing is computed."""
        session, info, size = self._hosted.team.session, self._hosted.model.info, len(message.data)
        wish = partial(check, message, hidden=info.hidden, experts_of=self._experts_of, largest=self._largest, prepared=self._prepared)
        work: Work = await aside(size, wish)
        began, computed, outputs = time.perf_counter_ns(), 0, []
        for piece in work.pieces(min(PIECE_ROWS, session.options.max_rows), info.top_k):
            output, nanoseconds = await self._hosted.engine.between(partial(self._compute, piece, work.kind))
            outputs.append(output)
            computed += nanoseconds
        waited = time.perf_counter_ns() - began - computed
        data = await aside(size, lambda: work.combine(outputs[0] if len(outputs) == 1 else b"".join(outputs), info.hidden))
        return pb.ExpertResult(id=message.id, data=bytes(data), compute_ns=computed, queue_ns=waited)

    def _compute(self, piece: ExpertBatch, kind: Kind) -> tuple[bytes | bytearray, int]:
        """On the engine's thread."""
        began = time.perf_counter_ns()
        return self._hosted.team.session.run_experts(piece, kind=kind), time.perf_counter_ns() - began


def _describe(hosted: Hosted, digest: str) -> node_pb2.NodeDescription:
    """What computes here. A server is no node, so it has no share: it computes every expert."""
    info = hosted.model.info
    return node_pb2.NodeDescription(
        name=socket.gethostname(),
        version=version("colibri"),
        protocol=PROTOCOL,
        isa=isa_name(),
        model=hosted.name,
        model_digest=digest,
        expert_format=_FORMAT_NAMES[info.expert_format],
        layers=info.layers,
        experts=info.experts,
        hidden=info.hidden,
        lanes=hosted.team.plan.lanes,
        state=node_pb2.NODE_STATE_READY,
    )
