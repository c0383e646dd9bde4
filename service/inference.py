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
from service.desk import Desk
from service.errors import Refusal, refusal
from service.faults import EngineFault, Fault, InvalidField, ShutDown, WorkersLost
from service.messages import Narrator, score_response, timings
from service.metrics import Metrics
from service.params import read_max_tokens, read_sampling, read_stops, read_top_logprobs
from service.request import Request
from service.served import Prompt, ServedModel
from service.streams import Stream

log = logging.getLogger("colibri.service")
_Response = TypeVar("_Response")
_Result = TypeVar("_Result")
_Context = grpc.aio.ServicerContext[Any, Any]
_INLINE = 4096  # bytes or tokens that are worked through on the loop; more would hold it up
_MAX_ID = 128


@dataclass(slots=True)
class Call:
    """A call as it runs: its id, and the request it led to, if it came that far."""

    id: str
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


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Holds no state of its own but a counter."""

    def __init__(self, model: ServedModel, desk: Desk, metrics: Metrics) -> None:
        self._model = model
        self._desk = desk
        self._metrics = metrics
        self._ids = itertools.count()

    # ------------------------------------------------------------ Generate

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        """Deltas, then one Finish."""
        await self._answer(context, lambda call: self._generate(request, context, call))

    async def _generate(self, message: pb.GenerateRequest, context: _Context, call: Call) -> None:
        self._model.check_name(message.model)
        narrator = await self._prepare(message, context)
        with self._desk.stream(narrator.request) as stream:
            call.request = narrator.request
            await call.greet(context)
            try:
                await self._tell(narrator, stream, context, streaming=not message.HasField("stream") or message.stream)
            except (ShutDown, WorkersLost, EngineFault):
                if narrator.request.ran:
                    narrator.reason = pb.FINISH_REASON_ABORT
                    await self._send_finish(narrator, call, context)
                raise
        await self._send_finish(narrator, call, context)
        self._observe(narrator)

    async def _prepare(self, message: pb.GenerateRequest, context: _Context) -> Narrator:
        """Everything that can be wrong with a request is found here."""
        model, bounds = self._model, self._model.bounds
        top_logprobs = read_top_logprobs(message)
        sampling = read_sampling(message.sampling, defaults=bounds.generation, top_logprobs=top_logprobs or 0)
        stops = read_stops(message.stop, bounds=bounds, has_tokenizer=model.tokenizer is not None)
        prompt = await self._read_prompt(message)
        max_tokens = read_max_tokens(message, prompt_tokens=len(prompt.tokens), field=prompt.field, bounds=bounds)
        request = Request(
            id=f"g{next(self._ids)}",
            prompt=tuple(prompt.tokens),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=stops.token_ids,
            deadline=_deadline(context),
        )
        skip_special = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        detokeniser = None if model.tokenizer is None else model.tokenizer.continuation(skip_special=skip_special)
        answer = Answer(detokeniser, stops=stops.strings, include_stop=stops.include_string)
        return Narrator(request, answer, logprobs=top_logprobs is not None, bytes_of=model.token_bytes)

    async def _tell(self, narrator: Narrator, stream: Stream, context: _Context, *, streaming: bool) -> None:
        last: float | None = None
        while not narrator.ended:
            before = narrator.tokens
            narrator.absorb(await stream.take())
            last = self._observe_tokens(narrator.tokens - before, last)
            delta = narrator.take_delta() if streaming or narrator.ended else None
            if delta is not None:
                await stream.send(context.write(pb.GenerateResponse(delta=delta)))
        if narrator.fault is not None:
            raise narrator.fault

    async def _send_finish(self, narrator: Narrator, call: Call, context: _Context) -> None:
        finish = narrator.finish(model=self._model.name, request_id=call.id, now=time.monotonic())
        await context.write(pb.GenerateResponse(finish=finish))

    # ------------------------------------------------------------ Score and the rest

    async def Score(self, request: pb.ScoreRequest, context: _Context) -> pb.ScoreResponse:
        """Log-probabilities of given tokens."""
        return await self._answer(context, lambda call: self._score(request, context, call))

    async def _score(self, message: pb.ScoreRequest, context: _Context, call: Call) -> pb.ScoreResponse:
        self._model.check_name(message.model)
        sampling = replace(GREEDY, top_logprobs=read_top_logprobs(message) or 0)
        prompt = await self._read_prompt(message)
        self._check_score(prompt)
        request = Request(f"s{next(self._ids)}", tuple(prompt.tokens), sampling, deadline=_deadline(context), score=True)
        rows: list[RowResult] = []
        with self._desk.stream(request) as stream:
            call.request = request
            while not stream.over:
                for update in await stream.take():
                    if update.fault is not None:
                        raise update.fault
                    rows += update.rows
        self._metrics.count_tokens(prompt=len(request.prompt), generated=0)
        ended = time.monotonic()
        tell = partial(score_response, request, rows, model=self._model.name, bytes_of=self._model.token_bytes, now=ended)
        return await _aside(len(rows) * (1 + sampling.top_logprobs), tell)

    def _check_score(self, prompt: Prompt) -> None:
        count, most = len(prompt.tokens), self._model.bounds.max_context
        if count < 2:
            raise InvalidField(prompt.field, "has one token; a score needs at least two, since nothing predicts the first")
        if count > most:
            raise InvalidField(prompt.field, f"has {count} tokens; the context holds {most}")

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """Text or a chat to tokens."""

        async def work(_: Call) -> pb.TokenizeResponse:
            self._model.check_name(request.model)
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            prompt = await self._read_prompt(request, add_special_tokens=special)
            return await _aside(len(prompt.tokens), lambda: self._tokenized(prompt))

        return await self._answer(context, work)

    def _tokenized(self, prompt: Prompt) -> pb.TokenizeResponse:
        pieces = [self._model.token_bytes(token) for token in prompt.tokens]
        return pb.TokenizeResponse(token_ids=prompt.tokens, token_bytes=pieces, prompt=prompt.text)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        """Tokens to text."""

        async def work(_: Call) -> pb.DetokenizeResponse:
            self._model.check_name(request.model)
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            decode = partial(self._model.detokenise, request.token_ids, skip_special=skip)
            return pb.DetokenizeResponse(text=await _aside(len(request.token_ids), decode))

        return await self._answer(context, work)

    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:
        """What the model is."""

        async def work(_: Call) -> pb.GetModelResponse:
            self._model.check_name(request.model)
            return pb.GetModelResponse(model=self._model.describe())

        return await self._answer(context, work)

    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        """All models, of which there is one."""

        async def work(_: Call) -> pb.ListModelsResponse:
            return pb.ListModelsResponse(models=[self._model.describe()])

        return await self._answer(context, work)

    # ------------------------------------------------------------ what they share

    async def _answer(self, context: _Context, work: Callable[[Call], Awaitable[_Response]]) -> _Response:
        """Runs a handler; a Fault becomes the call's status, and so does a bug of ours."""
        call = Call(read_request_id(context))
        try:
            with self._desk.call():
                response = await work(call)
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
        self._metrics.count_failure(refused.code)
        log.debug("call %s: %s: %s", call.id, refused.code, refused.sentence)
        status = refused.status()
        try:
            await context.abort(status.code, status.details or "", (*call.trailers(), *(status.trailing_metadata or ())))
        except grpc.aio.InternalError as gone:  # grpcio would log a traceback for every caller that does not wait for its refusal
            raise asyncio.CancelledError from gone

    async def _read_prompt(
        self, message: pb.GenerateRequest | pb.ScoreRequest | pb.TokenizeRequest, *, add_special_tokens: bool = True
    ) -> Prompt:
        return await _aside(message.ByteSize(), partial(self._model.read_prompt, message, add_special_tokens=add_special_tokens))

    def _observe_tokens(self, count: int, last: float | None) -> float:
        now = time.monotonic()
        if last is not None and count:
            for _ in range(count):
                self._metrics.inter_token.observe((now - last) / count)
        return now

    def _observe(self, narrator: Narrator) -> None:
        request, metrics = narrator.request, self._metrics
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
