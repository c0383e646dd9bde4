"""Requests whose bytes are no message of ours: refused as the caller's mistake, for every service. grpcio by itself answers UNKNOWN
with the name of a Python class and logs a traceback for each."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from service.errors import refusal
from service.faults import UnreadableRequest

_Context = grpc.aio.ServicerContext[Any, Any]
_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a request that could not be read: a deserialiser has no call that it could end."""

    cause: str


class ReadingInterceptor(grpc.aio.ServerInterceptor):
    """Passes on to handlers only what could be read."""

    def __init__(self, count_failure: Callable[[str], None]) -> None:
        """`count_failure` is told the status code of each refusal."""
        self._count_failure = count_failure

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, behind a check of its requests."""
        handler = await continuation(details)
        make = handler and _MAKERS.get((handler.request_streaming, handler.response_streaming))
        if not make:
            return handler
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
        checked = self._checked(behaviour, streaming=handler.request_streaming)
        return make(checked, _reader(handler.request_deserializer), handler.response_serializer)

    def _checked(self, behaviour: Callable[..., Any], *, streaming: bool) -> Callable[..., Any]:
        """A behaviour of the same kind, by which grpcio tells handlers that write from handlers that yield."""

        async def readable(given: Any, context: _Context) -> Any:
            if streaming:
                return self._each(given, context)
            await self._check(given, context)
            return given

        async def answers(given: Any, context: _Context) -> Any:
            return await behaviour(await readable(given, context), context)

        async def yields(given: Any, context: _Context) -> AsyncIterator[Any]:
            async for response in behaviour(await readable(given, context), context):
                yield response

        return yields if inspect.isasyncgenfunction(behaviour) else answers

    async def _each(self, requests: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
        async for request in requests:
            await self._check(request, context)
            yield request

    async def _check(self, request: Any, context: _Context) -> None:
        if isinstance(request, _Unreadable):
            refused = refusal(UnreadableRequest(request.cause))
            self._count_failure(refused.code)
            status = refused.status()
            await context.abort(status.code, status.details or "", status.trailing_metadata or ())


def _reader(deserialise: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialise(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read
