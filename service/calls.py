"""What the handlers of clients' calls share: the call's id and metadata, the model that is meant, faults to statuses, long work aside."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc.aio

from service.errors import Refusal, refusal
from service.faults import Fault
from service.hosted import Hosted
from service.messages import timings
from service.models import ModelHost
from service.request import Request
from service.served import HasInput, Prompt, ServedModel

log = logging.getLogger("colibri.service")
_Response = TypeVar("_Response")
_Result = TypeVar("_Result")
Context = grpc.aio.ServicerContext[Any, Any]
_INLINE = 4096  # bytes or tokens that are worked through on the loop; more would hold it up
_MAX_ID = 128


@dataclass(slots=True)
class Call:
    """A call as it runs: its id, the model that answers it, and the request it led to, if it came that far."""

    id: str
    hosted: Hosted | None = None
    request: Request | None = None
    greeted: bool = False  # initial metadata sent

    async def greet(self, context: Context) -> None:
        """Sends the initial metadata, once. Not before the call is accepted: a client retries by itself only what was refused bare."""
        if not self.greeted:
            self.greeted = True
            await context.send_initial_metadata((("x-request-id", self.id),))

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """The trailing metadata of its answer."""
        given: tuple[tuple[str, str], ...] = (("x-request-id", self.id),)
        request = self.request
        if request is None:
            return given
        spent = timings(request, now=time.monotonic())
        times = {"x-queue-ms": spent.queue_ms, "x-prefill-ms": spent.prefill_ms, "x-decode-ms": spent.decode_ms}
        given += tuple((name, f"{value:.3f}") for name, value in times.items())
        if request.damping is None:
            return given
        share = request.rerouted / request.routed if request.routed else 0.0
        return (*given, ("x-rerouted", str(request.rerouted)), ("x-rerouted-share", f"{share:.6f}"))


class Calls:
    """Answers calls about the models of a host."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def answer(self, context: Context, model: str, work: Callable[[Call, Hosted], Awaitable[_Response]]) -> _Response:
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

    async def _refuse(self, context: Context, call: Call, refused: Refusal) -> None:
        """Ends the call; does not return."""
        (call.hosted or self._host.default).metrics.count_failure(refused.code)
        log.debug("call %s: %s: %s", call.id, refused.code, refused.sentence)
        status = refused.status()
        try:
            await context.abort(status.code, status.details or "", (*call.trailers(), *(status.trailing_metadata or ())))
        except grpc.aio.InternalError as gone:  # grpcio would log a traceback for every caller that does not wait for its refusal
            raise asyncio.CancelledError from gone


def read_request_id(context: Context) -> str:
    """The caller's x-request-id if it is fit to be echoed, else a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and isinstance(value, str) and 0 < len(value) <= _MAX_ID and value.isascii() and value.isprintable():
            return value
    return uuid.uuid4().hex


def deadline(context: Context) -> float | None:
    """The call's deadline on time.monotonic's clock."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


async def read_prompt(model: ServedModel, message: HasInput, *, add_special_tokens: bool = True) -> Prompt:
    """A request's input as tokens. Raises InvalidField."""
    return await aside(message.ByteSize(), partial(model.read_prompt, message, add_special_tokens=add_special_tokens))


async def aside(size: int, work: Callable[[], _Result]) -> _Result:
    """Runs what takes long for large inputs where it does not hold up the loop."""
    return work() if size <= _INLINE else await asyncio.to_thread(work)
