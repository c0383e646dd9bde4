"""The handlers of colibri.v1.Experts: where a text's tokens go, and a layer's experts by themselves."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from colibri.v1 import experts_pb2 as pb, experts_pb2_grpc, inference_pb2
from engine_c import GREEDY, EngineError, Routes
from service.calls import Call, Calls, Context, aside, deadline, read_prompt
from service.experts_forward import PIECE_ROWS, Block, forward_response, read_hidden, run_block
from service.faults import EngineFault, InvalidField, QueueFull, WorkersLost, shown
from service.hosted import Hosted
from service.messages import timings
from service.models import ModelHost
from service.request import Request
from service.routing import choose_damping
from service.served import Prompt, ServedModel

ANSWER_BYTES = 4 << 20
"""Of an answer: what gRPC clients take unless they are told otherwise."""
_BESIDE = 1024  # bytes of an answer that are neither tokens nor tensors
_STREAM_RETRY = 1.0  # seconds
_OF_TOKEN = 8  # bytes of a token's number and of its bytes' frame


class ExpertsServicer(experts_pb2_grpc.ExpertsServicer):
    """Holds no state of its own but counters."""

    def __init__(self, host: ModelHost, *, streams: int) -> None:
        """streams: of Execute, at once, opened or not."""
        self._most = streams
        self._streams = 0
        self._calls = Calls(host)
        self._ids = itertools.count()

    async def Route(self, request: pb.RouteRequest, context: Context) -> pb.RouteResponse:
        """Each layer's experts for every token of a text."""
        return await self._calls.answer(context, request.model, lambda call, hosted: self._route(request, context, call, hosted))

    async def _route(self, message: pb.RouteRequest, context: Context, call: Call, hosted: Hosted) -> pb.RouteResponse:
        model = hosted.model
        layers = read_layers(message.layers, model)
        damping = choose_damping(message, info=model.info)
        prompt = await read_prompt(model, message)
        await aside(len(prompt.tokens), partial(check_length, prompt, model, layers=len(layers)))
        request = Request(f"e{next(self._ids)}", tuple(prompt.tokens), GREEDY, deadline=deadline(context), trace=True, damping=damping)
        chunks: list[Routes] = []
        with hosted.desk.stream(request) as stream:
            call.request = request
            while not stream.over:
                for update in await stream.take():
                    if update.fault is not None:
                        raise update.fault
                    if update.start == 0:  # one that was preempted begins anew
                        chunks.clear()
                    if update.routes is not None:
                        chunks.append(pick_layers(update.routes, layers, model))
        hosted.metrics.count_tokens(prompt=len(request.prompt), generated=0)
        tell = partial(route_response, request, chunks, layers=layers, model=model, now=time.monotonic())
        return await aside(len(request.prompt) * len(layers), tell)

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardResponse:
        """One layer's block of experts on the caller's rows."""
        return await self._calls.answer(context, request.model, lambda _, hosted: self._forward(request, hosted))

    async def _forward(self, message: pb.ForwardRequest, hosted: Hosted) -> pb.ForwardResponse:
        model, session = hosted.model, hosted.team.session
        _check_split(hosted)
        size = message.ByteSize()
        x = await aside(size, partial(read_hidden, message, model, largest=ANSWER_BYTES - _BESIDE))
        blocks: list[Block] = []
        most = min(PIECE_ROWS, session.options.max_rows)
        for start in range(0, len(x), most):
            piece = partial(run_block, session, message.layer, x[start : start + most], weighs_input=model.artifact.weighs_input)
            try:
                blocks.append(await hosted.engine.between(piece))
            except EngineError as error:
                if error.name == "ENOLANES":
                    raise WorkersLost(ran=False, sentence=str(error)) from error
                raise EngineFault(f"ENGINE_{error.name}", f"the engine could not run the experts: {error}") from error
        return await aside(size, partial(forward_response, message, model, blocks))


    async def Execute(self, requests: AsyncIterator[pb.ExecuteRequest], context: Context) -> None:
        """A caller's mini-batches of experts, until it has no more."""
        from service.experts_execute import Execution, await_opening  # here: it needs numpy, which would hold up every start

        async def full(_call: Call, _hosted: Hosted) -> None:
            raise QueueFull(f"{self._most} streams of experts are open already; try again", retry_after=_STREAM_RETRY)

        async def work(call: Call, hosted: Hosted) -> None:
            _check_split(hosted)
            await call.greet(context)
            await Execution(hosted, context, largest=ANSWER_BYTES - _BESIDE).run(opening, requests)

        if self._streams >= self._most:
            await self._calls.answer(context, "", full)
        self._streams += 1
        try:
            opening = await await_opening(requests)
            await self._calls.answer(context, opening.open.model if opening is not None else "", work)
        finally:
            self._streams -= 1


def _check_split(hosted: Hosted) -> None:
    if not hosted.team.session.options.split_down:
        raise InvalidField("model", f"{shown(hosted.name)} computes no experts by themselves here; serve it with --experts-api")


def read_layers(wanted: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    """The layers to tell of. Raises InvalidField."""
    routed = model.artifact.routed_layers
    if not routed:
        raise InvalidField("model", f"{shown(model.name)} has no router: it is dense, and every token goes the same way")
    for index, layer in enumerate(wanted):
        if layer not in routed:
            raise InvalidField(f"layers[{index}]", f"is {layer}, a layer without a router; those with one are {_ranges(routed)}")
        if layer in wanted[:index]:
            raise InvalidField(f"layers[{index}]", f"is {layer}, which is there already")
    return tuple(wanted) or routed


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def check_length(prompt: Prompt, model: ServedModel, *, layers: int) -> None:
    """Raises InvalidField for a prompt whose answer would be too large, or that the context does not hold."""
    count, context = len(prompt.tokens), model.bounds.max_context
    if count > context:
        raise InvalidField(prompt.field, f"has {count} tokens; the context holds {context}")
    each = layers * (8 * model.info.top_k + 4) + _OF_TOKEN
    size = _BESIDE + count * each + sum(len(model.token_bytes(token)) for token in prompt.tokens)
    if size > ANSWER_BYTES:
        most = (ANSWER_BYTES - _BESIDE) // (each + (size - _BESIDE - count * each) // count)
        sentence = f"has {count} tokens; the answer for {layers} layers would have {size} bytes of at most {ANSWER_BYTES}"
        raise InvalidField(prompt.field, f"{sentence}: give about {most} tokens or name fewer layers")


def pick_layers(routes: Routes, layers: Sequence[int], model: ServedModel) -> Routes:
    """Those of a chunk that are told of, so that no more of a long text is kept than its answer has."""
    places = [model.artifact.routed_layers.index(layer) for layer in layers]
    return Routes(routes.experts[places], routes.weights[places], routes.margins[places])


def route_response(
    request: Request, chunks: Sequence[Routes], *, layers: Sequence[int], model: ServedModel, now: float
) -> pb.RouteResponse:
    """The answer of chunks of these layers that follow each other."""
    import numpy as np

    experts = np.concatenate([chunk.experts for chunk in chunks], axis=1)
    weights = np.concatenate([chunk.weights for chunk in chunks], axis=1)
    margins = np.concatenate([chunk.margins for chunk in chunks], axis=1)
    return pb.RouteResponse(
        model=model.name,
        token_ids=request.prompt,
        token_bytes=[model.token_bytes(token) for token in request.prompt],
        layers=layers,
        experts_per_layer=model.info.experts,
        experts=pb.Tensor(dtype=pb.DATA_TYPE_I32, shape=experts.shape, data=experts.astype("<i4").tobytes()),
        weights=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=weights.shape, data=weights.astype("<f4").tobytes()),
        margins=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=margins.shape, data=margins.astype("<f4").tobytes()),
        rerouted=request.rerouted,
        routed=request.routed,
        usage=inference_pb2.Usage(prompt_tokens=len(request.prompt)),
        timings=timings(request, now=now),
    )
