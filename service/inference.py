"""The handlers of colibri.v1.Inference: check, tokenise, submit, and send what comes of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from colibri.v1 import inference_pb2 as pb, inference_pb2_grpc
from engine_c import GREEDY, RowResult
from service.answer import Answer
from service.errors import Refusal, refusal
from service.faults import EngineFault, Fault, InvalidField, ShutDown, WorkersLost
from service.hosted import Hosted
from service.messages import Narrator, score_response, timings
from service.metrics import ModelMetrics
from service.models import ModelHost
from service.params import read_max_tokens, read_sampling, read_stops, read_stream_interval, read_top_logprobs
from service.request import Request
from service.served import Prompt, ServedModel
from service.streams import Stream, Writer
from service.telling import Teller

log = logging.getLogger("colibri.service")
_Response = TypeVar("_Response")
_Result = TypeVar("_Result")
_Context = grpc.aio.ServicerContext[Any, Any]
_INLINE = 4096  # bytes or tokens that are worked through on the loop; more would hold it up
_MAX_ID = 128
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name


@dataclass(slots=True)
class Call:
    """A call as it runs: its id, the model that answers it, and the request it led to, if it came that far."""

    id: str
    hosted: Hosted | None = None
    request: Request | None = None
    greeted: bool = False  # initial metadata sent

    async def greet(self, context: _Context) -> None:
        """Sends the initial metadata, once. Not before the call is accepted: a client retries by itself only what was refused bare."""
        if not self.greeted:
            self.greeted = True
            await context.send_initial_metadata((("x-request-id", self.id),))

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """The trailing metadata of its answer."""
        given: tuple[tuple[str, str], ...] = (("x-request-id", self.id),)
        if self.request is None:
            return given
        spent = timings(self.request, now=time.monotonic())
        times = {"x-queue-ms": spent.queue_ms, "x-prefill-ms": spent.prefill_ms, "x-decode-ms": spent.decode_ms}
        return given + tuple((name, f"{value:.3f}") for name, value in times.items())


def read_request_id(context: _Context) -> str:
    """The caller's x-request-id if it is fit to be echoed, else a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and isinstance(value, str) and 0 < len(value) <= _MAX_ID and value.isascii() and value.isprintable():
            return value
    return uuid.uuid4().hex


def add_inference(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Registers the service. Generate writes its messages as bytes."""
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    read = pb.GenerateRequest.FromString
    generate: grpc.RpcMethodHandler[pb.GenerateRequest, bytes]
    generate = grpc.unary_stream_rpc_method_handler(servicer.Generate, request_deserializer=read)
    server.add_registered_method_handlers(SERVICE, {"Generate": generate})


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Holds no state of its own but a counter."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._ids = itertools.count()

    # ------------------------------------------------------------ Generate

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        """Deltas, then one Finish."""
        await self._answer(context, request.model, lambda call, hosted: self._generate(request, context, call, hosted))

    async def _generate(self, message: pb.GenerateRequest, context: _Context, call: Call, hosted: Hosted) -> None:
        narrator = await self._prepare(message, context, hosted.model)
        with hosted.desk.stream(narrator.request) as stream:
            call.request = narrator.request
            await call.greet(context)
            try:
                streaming = not message.HasField("stream") or message.stream
                await self._tell(narrator, stream, context, hosted.metrics, streaming=streaming)
            except (ShutDown, WorkersLost, EngineFault):
                if narrator.request.ran:
                    narrator.reason = pb.FINISH_REASON_ABORT
                    await self._send_finish(narrator, call, context, hosted)
                raise
        await self._send_finish(narrator, call, context, hosted)
        _observe(narrator, hosted.metrics)

    async def _prepare(self, message: pb.GenerateRequest, context: _Context, model: ServedModel) -> Narrator:
        """Everything that can be wrong with a request is found here."""
        bounds = model.bounds
        top_logprobs = read_top_logprobs(message)
        sampling = read_sampling(message.sampling, defaults=bounds.generation, top_logprobs=top_logprobs or 0)
        stops = read_stops(message.stop, bounds=bounds, has_tokenizer=model.tokenizer is not None)
        prompt = await _read_prompt(model, message)
        max_tokens = read_max_tokens(message, prompt_tokens=len(prompt.tokens), field=prompt.field, bounds=bounds)
        request = Request(
            id=f"g{next(self._ids)}",
            prompt=tuple(prompt.tokens),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=stops.token_ids,
            deadline=_deadline(context),
            interval=read_stream_interval(message),
        )
        skip_special = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        detokeniser = None if model.tokenizer is None else model.tokenizer.continuation(skip_special=skip_special)
        answer = Answer(detokeniser, stops=stops.strings, include_stop=stops.include_string)
        return Narrator(request, answer, logprobs=top_logprobs is not None, bytes_of=model.token_bytes)

    async def _tell(self, narrator: Narrator, stream: Stream, context: _Context, metrics: ModelMetrics, *, streaming: bool) -> None:
        async with Teller(narrator, stream, Writer(context.write), metrics, streaming=streaming) as teller:
            await teller.ended()
        if (delta := narrator.take_delta()) is not None:
            await context.write(delta)
        if narrator.fault is not None:
            raise narrator.fault

    async def _send_finish(self, narrator: Narrator, call: Call, context: _Context, hosted: Hosted) -> None:
        await context.write(narrator.finish(model=hosted.name, request_id=call.id, now=time.monotonic()))

    # ------------------------------------------------------------ Score and the rest

    async def Score(self, request: pb.ScoreRequest, context: _Context) -> pb.ScoreResponse:
        """Log-probabilities of given tokens."""
        return await self._answer(context, request.model, lambda call, hosted: self._score(request, context, call, hosted))

    async def _score(self, message: pb.ScoreRequest, context: _Context, call: Call, hosted: Hosted) -> pb.ScoreResponse:
        sampling = replace(GREEDY, top_logprobs=read_top_logprobs(message) or 0)
        prompt = await _read_prompt(hosted.model, message)
        _check_score(prompt, hosted.model.bounds.max_context)
        request = Request(f"s{next(self._ids)}", tuple(prompt.tokens), sampling, deadline=_deadline(context), score=True)
        rows: list[RowResult] = []
        with hosted.desk.stream(request) as stream:
            call.request = request
            while not stream.over:
                for update in await stream.take():
                    if update.fault is not None:
                        raise update.fault
                    rows += update.rows
        hosted.metrics.count_tokens(prompt=len(request.prompt), generated=0)
        ended = time.monotonic()
        tell = partial(score_response, request, rows, model=hosted.name, bytes_of=hosted.model.token_bytes, now=ended)
        return await _aside(len(rows) * (1 + sampling.top_logprobs), tell)

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """Text or a chat to tokens."""

        async def work(_: Call, hosted: Hosted) -> pb.TokenizeResponse:
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            prompt = await _read_prompt(hosted.model, request, add_special_tokens=special)
            return await _aside(len(prompt.tokens), partial(_tokenized, hosted.model, prompt))

        return await self._answer(context, request.model, work)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        """Tokens to text."""

        async def work(_: Call, hosted: Hosted) -> pb.DetokenizeResponse:
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            decode = partial(hosted.model.detokenise, request.token_ids, skip_special=skip)
            return pb.DetokenizeResponse(text=await _aside(len(request.token_ids), decode))

        return await self._answer(context, request.model, work)

    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:
        """What the model is."""

        async def work(_: Call, hosted: Hosted) -> pb.GetModelResponse:
            return pb.GetModelResponse(model=hosted.describe())

        return await self._answer(context, request.model, work)

    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        """All models that requests may name."""

        async def work(_: Call, __: Hosted) -> pb.ListModelsResponse:
            return pb.ListModelsResponse(models=[hosted.describe() for hosted in self._host.models if hosted.takes_requests])

        return await self._answer(context, "", work)

    # ------------------------------------------------------------ what they share

    async def _answer(self, context: _Context, model: str, work: Callable[[Call, Hosted], Awaitable[_Response]]) -> _Response:
        """Runs a handler with the model that is meant; a Fault becomes the call's status, and so does a bug of ours."""
        call = Call(read_request_id(context))
        try:
            call.hosted = hosted = self._host.resolve(model)
            with hosted.desk.call():
                response = await work(call, hosted)
                await call.greet(context)
                context.set_trailing_metadata(call.trailers())
                return response
        except Fault as fault:
            refused = refusal(fault)
        except Exception as error:
            if isinstance(error, grpc.aio.InternalError):  # a batch the core did not execute: the caller has gone
                raise asyncio.CancelledError from error
            if context.cancelled() or isinstance(error, grpc.aio.BaseError):
                raise
            log.exception("call %s failed", call.id)
            refused = refusal(error)
        await self._refuse(context, call, refused)
        raise AssertionError("context.abort returned")

    async def _refuse(self, context: _Context, call: Call, refused: Refusal) -> None:
        """Ends the call; does not return."""
        (call.hosted or self._host.default).metrics.count_failure(refused.code)
        log.debug("call %s: %s: %s", call.id, refused.code, refused.sentence)
        status = refused.status()
        try:
            await context.abort(status.code, status.details or "", (*call.trailers(), *(status.trailing_metadata or ())))
        except grpc.aio.InternalError as gone:  # grpcio would log a traceback for every caller that does not wait for its refusal
            raise asyncio.CancelledError from gone


def _check_score(prompt: Prompt, most: int) -> None:
    count = len(prompt.tokens)
    if count < 2:
        raise InvalidField(prompt.field, "has one token; a score needs at least two, since nothing predicts the first")
    if count > most:
        raise InvalidField(prompt.field, f"has {count} tokens; the context holds {most}")


def _tokenized(model: ServedModel, prompt: Prompt) -> pb.TokenizeResponse:
    pieces = [model.token_bytes(token) for token in prompt.tokens]
    return pb.TokenizeResponse(token_ids=prompt.tokens, token_bytes=pieces, prompt=prompt.text)


async def _read_prompt(
    model: ServedModel, message: pb.GenerateRequest | pb.ScoreRequest | pb.TokenizeRequest, *, add_special_tokens: bool = True
) -> Prompt:
    return await _aside(message.ByteSize(), partial(model.read_prompt, message, add_special_tokens=add_special_tokens))


def _observe(narrator: Narrator, metrics: ModelMetrics) -> None:
    request = narrator.request
    metrics.count_success(pb.FinishReason.Name(narrator.reason).removeprefix("FINISH_REASON_").lower())
    metrics.count_tokens(prompt=len(request.prompt), generated=narrator.tokens)
    metrics.end_to_end.observe(time.monotonic() - request.arrived)
    if request.started is not None and request.first_token is not None:
        metrics.queue_time.observe(request.started - request.arrived)
        metrics.first_token.observe(request.first_token - request.arrived)


async def _aside(size: int, work: Callable[[], _Result]) -> _Result:
    """Runs what takes long for large inputs where it does not hold up the loop."""
    return work() if size <= _INLINE else await asyncio.to_thread(work)


def _deadline(context: _Context) -> float | None:
    """The call's deadline on time.monotonic's clock."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
