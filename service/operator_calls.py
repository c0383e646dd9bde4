"""What the handlers of operators' calls share: faults to statuses, and changes that follow one another and are seen through."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from service.errors import refusal
from service.faults import Draining, Fault, InvalidField, OperatorFault
from service.hosted import Hosted
from service.models import ModelHost
from workers.plan import PlanError
from workers.team import ScaleError, Team

log = logging.getLogger("colibri.service")
Context = grpc.aio.ServicerContext[Any, Any]
_Result = TypeVar("_Result")


async def change(host: ModelHost, hosted: Hosted, field: str, work: Callable[[Team], _Result]) -> _Result:
    """Sees a change of a model's team through once it has begun, whatever becomes of the call; changes of one team follow one another.
    `field` of the request is what no plan could be made of, if none can."""
    begun = asyncio.Event()

    async def in_turn() -> _Result:
        async with hosted.changes:
            begun.set()
            if host.draining:  # those that have not begun must not hold up the end
                raise Draining
            if hosted.closing:
                raise OperatorFault("NOT_FOUND", "UNKNOWN_MODEL", f"model {hosted.name!r} has been unloaded", model=hosted.name)
            try:
                return await hosted.aside(lambda _: work(hosted.team))
            except KeyError as error:
                sentence = f"model {hosted.name!r} has no worker {error.args[0]}"
                raise OperatorFault("NOT_FOUND", "UNKNOWN_WORKER", sentence) from error

    try:
        return await host.see_through(in_turn(), begun=begun)
    except ScaleError as error:
        if isinstance(error.__cause__, PlanError):
            raise InvalidField(field, str(error)) from error
        raise OperatorFault("ABORTED", "SCALE_FAILED", str(error)) from error


async def answer(context: Context, work: Callable[[], Awaitable[_Result]]) -> _Result:
    """Runs a handler; a Fault becomes the call's status, and so does a bug of ours."""
    try:
        return await work()
    except Exception as error:
        if isinstance(error, grpc.aio.BaseError):
            raise
        if not isinstance(error, Fault):
            log.exception("an operator's call failed")
        await refuse(context, error)
    raise AssertionError("context.abort returned")


async def refuse(context: Context, error: Exception) -> None:
    """Ends the call; does not return."""
    status = refusal(error).status()
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
