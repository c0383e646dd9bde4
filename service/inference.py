"""The handlers of colibri.v1.Inference: check, tokenise, submit, and send what comes of it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial

import grpc
import grpc.aio

from colibri.v1 import inference_pb2 as pb, inference_pb2_grpc
from engine_c import GREEDY, RowResult
from service.answer import Answer
from service.calls import Call, Calls, Context, aside, deadline, read_prompt
from service.faults import EngineFault, InvalidField, ShutDown, WorkersLost
from service.hosted import Hosted
from service.messages import Narrator, score_response
from service.metrics import ModelMetrics
from service.models import ModelHost
from service.params import read_max_tokens, read_sampling, read_stops, read_stream_interval, read_top_logprobs
from service.request import Request
from service.routing import choose_damping
from service.served import Prompt, ServedModel
from service.streams import Stream, Writer
from service.telling import Teller

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name


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
        self._calls = Calls(host)
        self._ids = itertools.count()

    # ------------------------------------------------------------ Generate

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Deltas, then one Finish."""
        await self._calls.answer(context, request.model, lambda call, hosted: self._generate(request, context, call, hosted))

    async def _generate(self, message: pb.GenerateRequest, context: Context, call: Call, hosted: Hosted) -> None:
        narrator = await self._prepare(message, context, hosted)
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

    async def _prepare(self, message: pb.GenerateRequest, context: Context, hosted: Hosted) -> Narrator:
        """Everything that can be wrong with a request is found here."""
        model = hosted.model
        bounds = model.bounds
        top_logprobs = read_top_logprobs(message)
        sampling = read_sampling(message.sampling, defaults=bounds.generation, top_logprobs=top_logprobs or 0)
        damping = choose_damping(message, info=model.info, default=hosted.usual_damping, seeded=message.sampling.HasField("seed"))
        stops = read_stops(message.stop, bounds=bounds, has_tokenizer=model.tokenizer is not None)
        prompt = await read_prompt(model, message)
        max_tokens = read_max_tokens(message, prompt_tokens=len(prompt.tokens), field=prompt.field, bounds=bounds)
        request = Request(
            id=f"g{next(self._ids)}",
            prompt=tuple(prompt.tokens),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=stops.token_ids,
            deadline=deadline(context),
            interval=read_stream_interval(message),
            damping=damping,
        )
        skip_special = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        detokeniser = None if model.tokenizer is None else model.tokenizer.continuation(skip_special=skip_special)
        answer = Answer(detokeniser, stops=stops.strings, include_stop=stops.include_string)
        return Narrator(request, answer, logprobs=top_logprobs is not None, bytes_of=model.token_bytes)

    async def _tell(self, narrator: Narrator, stream: Stream, context: Context, metrics: ModelMetrics, *, streaming: bool) -> None:
        async with Teller(narrator, stream, Writer(context.write), metrics, streaming=streaming) as teller:
            await teller.ended()
        if (delta := narrator.take_delta()) is not None:
            await context.write(delta)
        if narrator.fault is not None:
            raise narrator.fault

    async def _send_finish(self, narrator: Narrator, call: Call, context: Context, hosted: Hosted) -> None:
        await context.write(narrator.finish(model=hosted.name, request_id=call.id, now=time.monotonic()))

    # ------------------------------------------------------------ Score and the rest

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Log-probabilities of given tokens."""
        return await self._calls.answer(context, request.model, lambda call, hosted: self._score(request, context, call, hosted))

    async def _score(self, message: pb.ScoreRequest, context: Context, call: Call, hosted: Hosted) -> pb.ScoreResponse:
        sampling = replace(GREEDY, top_logprobs=read_top_logprobs(message) or 0)
        damping = choose_damping(message, info=hosted.model.info)
        prompt = await read_prompt(hosted.model, message)
        _check_score(prompt, hosted.model.bounds.max_context)
        name = f"s{next(self._ids)}"
        request = Request(name, tuple(prompt.tokens), sampling, deadline=deadline(context), score=True, damping=damping)
        rows: list[RowResult] = []
        with hosted.desk.stream(request) as stream:
            call.request = request
            while not stream.over:
                for update in await stream.take():
                    if update.fault is not None:
                        raise update.fault
                    rows[update.start :] = update.rows  # one that was preempted begins anew
        hosted.metrics.count_tokens(prompt=len(request.prompt), generated=0)
        ended = time.monotonic()
        tell = partial(score_response, request, rows, model=hosted.name, bytes_of=hosted.model.token_bytes, now=ended)
        return await aside(len(rows) * (1 + sampling.top_logprobs), tell)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text or a chat to tokens."""

        async def work(_: Call, hosted: Hosted) -> pb.TokenizeResponse:
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            prompt = await read_prompt(hosted.model, request, add_special_tokens=special)
            return await aside(len(prompt.tokens), partial(_tokenized, hosted.model, prompt))

        return await self._calls.answer(context, request.model, work)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Tokens to text."""

        async def work(_: Call, hosted: Hosted) -> pb.DetokenizeResponse:
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            decode = partial(hosted.model.detokenise, request.token_ids, skip_special=skip)
            return pb.DetokenizeResponse(text=await aside(len(request.token_ids), decode))

        return await self._calls.answer(context, request.model, work)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """What the model is."""

        async def work(_: Call, hosted: Hosted) -> pb.GetModelResponse:
            return pb.GetModelResponse(model=hosted.describe())

        return await self._calls.answer(context, request.model, work)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """All models that requests may name."""

        async def work(_: Call, __: Hosted) -> pb.ListModelsResponse:
            return pb.ListModelsResponse(models=[hosted.describe() for hosted in self._host.models if hosted.takes_requests])

        return await self._calls.answer(context, "", work)


def _check_score(prompt: Prompt, most: int) -> None:
    count = len(prompt.tokens)
    if count < 2:
        raise InvalidField(prompt.field, "has one token; a score needs at least two, since nothing predicts the first")
    if count > most:
        raise InvalidField(prompt.field, f"has {count} tokens; the context holds {most}")


def _tokenized(model: ServedModel, prompt: Prompt) -> pb.TokenizeResponse:
    pieces = [model.token_bytes(token) for token in prompt.tokens]
    return pb.TokenizeResponse(token_ids=prompt.tokens, token_bytes=pieces, prompt=prompt.text)


def _observe(narrator: Narrator, metrics: ModelMetrics) -> None:
    request = narrator.request
    metrics.count_success(pb.FinishReason.Name(narrator.reason).removeprefix("FINISH_REASON_").lower())
    metrics.count_tokens(prompt=len(request.prompt), generated=narrator.tokens)
    metrics.end_to_end.observe(time.monotonic() - request.arrived)
    if request.started is not None and request.first_token is not None:
        metrics.queue_time.observe(request.started - request.arrived)
        metrics.first_token.observe(request.first_token - request.arrived)
