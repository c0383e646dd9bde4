"""Answers to front ends: Node.Describe, Node.Assign and Experts.Execute, on threads of a synchronous server.

A stream's own thread computes its batches: nothing is handed from thread to thread between the wire and the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import ErrorInfo

from colibri.v1 import experts_pb2 as pb, node_pb2
from engine_c import EngineError
from service.errors import DOMAIN, Refusal
from service.node import hello
from service.node.agent import Agent
from service.node.batches import BatchError, check
from service.node.hello import StreamRefused, batch_of, caller_of, check_opening, failure_code, never_opened, stream_idle
from service.node.idle import Seats
from service.node.layers import NoRoom, Room, check_layers
from service.node.metrics import NodeMetrics
from service.printable import counted, printable
from service.wire import enclose
from workers.growing import ShareError, ShareTooLarge, UnknownExpert
from workers.segments import SegmentError

log = logging.getLogger("colibri.node")

_SERVICE = pb.DESCRIPTOR.services_by_name["Experts"].full_name
_RESULT = pb.ExecuteResponse.DESCRIPTOR.fields_by_name["result"].number
_DATA = pb.ExpertResult.DESCRIPTOR.fields_by_name["data"].number
_SAY_AGAIN = 60.0  # seconds
MAX_UNOPENED = 64
"""Streams whose first message has not come: they take a thread, but not the place of one that is open."""
_LONGEST_WAIT_MS = 10_000  # of a call that waits for news
Send = Callable[[bytes | None], None]
"""Sends an answer; None: ends the stream, with the status that its context has."""
Done = tuple[bytes | bytearray, int, int]
"""An answer, the nanoseconds it was computed for, and those it waited before."""


def refuse(context: grpc.ServicerContext, code: str, reason: str, sentence: str) -> NoReturn:
    """Ends a call with a status that has an ErrorInfo."""
    context.abort_with_status(_refusal(code, reason, sentence).status())
    raise AssertionError("abort returned")


def _refusal(code: str, reason: str, sentence: str) -> Refusal:
    return Refusal(code, sentence, [ErrorInfo(reason=reason, domain=DOMAIN)])


def _peer_of(context: grpc.ServicerContext) -> str:
    return unquote(context.peer()).partition(":")[2]  # without the kind of address


class NodeCalls:
    """colibri.v1.Node."""

    def __init__(self, agent: Agent, seats: Seats) -> None:
        self._agent = agent
        self._seats = seats

    def Describe(self, request: node_pb2.DescribeRequest, context: grpc.ServicerContext) -> node_pb2.NodeDescription:
        """What the node is and holds; waits for news if asked to. Who asks keeps the streams of the same connection."""
        self._seats.hear(context.peer())
        if request.wait_ms:
            seconds = min(request.wait_ms, _LONGEST_WAIT_MS) / 1e3
            self._agent.news.wait(request.revision, seconds, room=self._agent.config.max_streams)
            self._seats.hear(context.peer())
        return self._agent.describe()

    def Assign(self, request: node_pb2.AssignRequest, context: grpc.ServicerContext) -> node_pb2.NodeDescription:
        """Takes a share, if none was given by flag."""
        agent = self._agent
        if not agent.config.assignable:
            sentence = f"this node was started with {agent.config.given}; start it with share auto"
            refuse(context, "FAILED_PRECONDITION", "SHARE_GIVEN", sentence)
        shares = {share.layer: tuple(share.experts) for share in request.shares}
        if len(shares) != len(request.shares):
            refuse(context, "INVALID_ARGUMENT", "BAD_SHARE", "shares: a layer is there more than once")
        for layer, experts in shares.items():
            if any(a >= b for a, b in pairwise(experts)):
                refuse(context, "INVALID_ARGUMENT", "BAD_SHARE", f"shares: the experts of layer {layer} must ascend, each once")
        try:
            agent.assign(shares)
        except UnknownExpert as error:
            refuse(context, "INVALID_ARGUMENT", "BAD_SHARE", f"shares: {error}")
        except ShareTooLarge as error:
            refuse(context, "RESOURCE_EXHAUSTED", "NO_ROOM", f"this share is not taken: {error}")
        except ShareError as error:
            refuse(context, "UNAVAILABLE", "SHARE_NOT_READ", f"this share is not taken: {error}")
        log.info("assigned %s, %d MiB", counted(sum(map(len, shares.values())), "expert"), agent.share_bytes >> 20)
        return agent.describe()


@dataclass(slots=True)
class Stream:
    """One front end's. prepared: whether it may send such rows. room: its KV blocks, if it asked for any."""

    caller: str
    prepared: bool
    room: Room | None = None
    complained: bool = False  # the log has its first failure; metrics count the others


class ExpertCalls:
    """colibri.v1.Experts, of which a node does Execute."""

    def __init__(self, agent: Agent, metrics: NodeMetrics) -> None:
        self._agent = agent
        self._metrics = metrics
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._refused: dict[tuple[str, str], float] = {}  # when it was last said of a host why
        self._unopened = 0  # streams whose first message has not come
        self.seats = Seats(agent.config.idle_timeout)
        self.streams = 0

    @property
    def quiet_for(self) -> float:
        """Seconds in which no stream has asked for anything."""
        return time.monotonic() - self._last

    def Route(self, request: pb.RouteRequest, context: grpc.ServicerContext) -> pb.RouteResponse:
        """Not here."""
        refuse(context, "UNIMPLEMENTED", "NODE", "a node computes experts by Execute only; ask a server")

    def Forward(self, request: pb.ForwardRequest, context: grpc.ServicerContext) -> pb.ForwardResponse:
        """Not here."""
        refuse(context, "UNIMPLEMENTED", "NODE", "a node computes experts by Execute only; ask a server")

    def Execute(self, requests: Iterator[pb.ExecuteRequest], context: grpc.ServicerContext, send: Send) -> None:
        """One stream, from its opening to its end. Answers are encoded."""
        try:
            opening = self._await_opening(requests)
        except StreamRefused as refused:
            refuse(context, refused.code, refused.reason, str(refused))
        with self._lock:
            taken = self.streams < self._agent.config.max_streams
            self.streams += taken
        if not taken:
            refuse(context, "RESOURCE_EXHAUSTED", "TOO_MANY_STREAMS", f"{self._agent.config.max_streams} streams are open already")
        stream: Stream | None = None
        seat = self.seats.take(context.peer(), lambda: self._end_idle(context, send))
        try:
            stream = self._open(opening, context)
            send(pb.ExecuteResponse(opened=self._agent.describe()).SerializeToString())
            for request in seat.take(requests):
                layers = request.WhichOneof("kind") == "layers"
                send(self._answer(request.layers if layers else batch_of(request), stream))
            if not seat.ended:
                send(None)
        except StreamRefused as refused:
            refuse(context, refused.code, refused.reason, str(refused))
        finally:
            self.seats.leave(seat)
            if stream is not None and stream.room is not None:
                self._agent.give_room(stream.room)
            with self._lock:
                self.streams -= 1

    def _end_idle(self, context: grpc.ServicerContext, send: Send) -> None:
        """While the stream's own thread waits for the next request."""
        refused = stream_idle(self.seats.limit)
        status = _refusal(refused.code, refused.reason, str(refused)).status()
        context.set_code(status.code)
        context.set_details(status.details)
        context.set_trailing_metadata(status.trailing_metadata)
        log.info("a stream from %s is ended: its caller has said nothing for %g s", _peer_of(context), self.seats.limit)
        send(None)

    def _await_opening(self, requests: Iterator[pb.ExecuteRequest]) -> pb.ExecuteRequest:
        """The first message. StreamRefused."""
        with self._lock:
            taken = self._unopened < MAX_UNOPENED
            self._unopened += taken
        if not taken:
            raise StreamRefused("RESOURCE_EXHAUSTED", "TOO_MANY_STREAMS", f"{MAX_UNOPENED} streams are yet to be opened by their callers")
        try:
            return _first(requests)
        finally:
            with self._lock:
                self._unopened -= 1

    def _open(self, request: pb.ExecuteRequest, context: grpc.ServicerContext) -> Stream:
        opening, agent = request.open, self._agent
        peer = _peer_of(context)
        caller = f"{caller_of(opening)} at {peer}"
        if agent.news.draining:
            refuse(context, "UNAVAILABLE", "DRAINING", "this node is draining: it takes no more streams")
        try:
            prepared = check_opening(request, model=agent.model_name, digest=agent.digest, here="this node")
            room = self._room(opening, caller) if opening.kv_blocks else None
        except StreamRefused as refused:
            self._say_refused(opening, peer, str(refused))
            refuse(context, refused.code, refused.reason, str(refused))
        log.info("%s has opened a stream%s", caller, f" with {room.blocks} KV blocks" if room else "")
        return Stream(caller, prepared, room)

    def _say_refused(self, opening: pb.OpenStream, peer: str, sentence: str) -> None:
        """Once a minute for each reason: front ends look again every second."""
        host, now = peer.rpartition(":")[0], time.monotonic()
        with self._lock:
            self._refused = {key: at for key, at in self._refused.items() if now - at < _SAY_AGAIN}
            news = self._refused.setdefault((host, sentence), now) == now
        if news:
            log.warning("refused %s at %s: %s", caller_of(opening), host, sentence)

    def _room(self, opening: pb.OpenStream, caller: str) -> Room:
        agent, format_name = self._agent, self._agent.config.kv_format
        if not agent.ranges:
            sentence = f"kv_blocks: this node was started with {agent.config.given}: it runs no layers"
            raise StreamRefused("FAILED_PRECONDITION", "NO_LAYERS", sentence)
        if opening.kv_format != format_name:
            theirs = printable(opening.kv_format, most=16) or "no format"
            sentence = f"the caller has its KV cache in {theirs}, this node in {format_name}: set kv_format alike"
            raise StreamRefused("FAILED_PRECONDITION", "KV_FORMAT_DIFFERS", sentence)
        try:
            return agent.take_room(opening.kv_blocks, owner=caller, instance=opening.instance)
        except NoRoom as error:
            raise StreamRefused("RESOURCE_EXHAUSTED", "KV_FULL", str(error)) from error

    def _answer(self, message: pb.ExpertBatch | pb.LayerBatch, stream: Stream) -> bytes:
        self._last = time.monotonic()
        try:
            done = self._experts(message, stream) if isinstance(message, pb.ExpertBatch) else self._layers(message, stream)
        except BatchError as error:
            return self._failed(stream, message.id, Code.INVALID_ARGUMENT, str(error))
        except EngineError as error:
            return self._failed(stream, message.id, failure_code(error), str(error))
        except SegmentError as error:
            return self._failed(stream, message.id, Code.UNAVAILABLE, str(error))
        finally:
            self._last = time.monotonic()
        data, compute_ns, queue_ns = done
        self._metrics.computed(seconds=compute_ns / 1e9, waited=queue_ns / 1e9)
        return enclose(_RESULT, pb.ExpertResult(id=message.id, compute_ns=compute_ns, queue_ns=queue_ns), _DATA, data)

    def _experts(self, message: pb.ExpertBatch, stream: Stream) -> Done:
        agent = self._agent
        hidden, largest = agent.team.model.info.hidden, agent.config.max_message_bytes
        done = agent.compute(check(message, hidden=hidden, experts_of=agent.experts_of, largest=largest, prepared=stream.prepared))
        self._metrics.pairs(sum(message.counts))
        return done

    def _layers(self, message: pb.LayerBatch, stream: Stream) -> Done:
        agent, info = self._agent, self._agent.team.model.info
        work = check_layers(message, hidden=info.hidden, ranges=agent.ranges, context=info.max_context, room=stream.room)
        assert stream.room is not None  # checked
        done = agent.run_layers(work, stream.room)
        self._metrics.hop(rows=len(work.x))
        return done

    def _failed(self, stream: Stream, number: int, code: int, sentence: str) -> bytes:
        if not stream.complained:
            log.warning("a batch of %s failed: %s", stream.caller, sentence)
        stream.complained = True
        self._metrics.failed(Code.Name(code))
        return pb.ExecuteResponse(failed=pb.BatchFailure(id=number, code=code, message=sentence)).SerializeToString()


def _first(requests: Iterator[pb.ExecuteRequest]) -> pb.ExecuteRequest:
    """StreamRefused if nothing comes in time. What the call's end raises otherwise."""
    came: Future[pb.ExecuteRequest] = Future()

    def read() -> None:
        try:
            came.set_result(next(requests, pb.ExecuteRequest()))
        except BaseException as error:
            came.set_exception(error)

    threading.Thread(target=read, name="opening", daemon=True).start()  # an iterator of gRPC's cannot be waited for but by reading
    try:
        return came.result(hello.OPENING_S)
    except TimeoutError:  # the end of the call ends the thread
        raise never_opened() from None


@dataclass(frozen=True, slots=True)
class _Execute:
    """Execute as gRPC calls it with something to send answers by, as it does health's Watch: then another thread can end a stream, with a
    status, whose own thread waits for the next request."""

    calls: ExpertCalls
    experimental_non_blocking: bool = True

    def __call__(self, requests: Iterator[pb.ExecuteRequest], context: grpc.ServicerContext, send: Send) -> None:
        self.calls.Execute(requests, context, send)


def add_expert_calls(server: grpc.Server, calls: ExpertCalls) -> None:
    """Registers the service as the generated code does, but that the answers of Execute are bytes already."""
    unary, streaming = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Route": unary(calls.Route, pb.RouteRequest.FromString, pb.RouteResponse.SerializeToString),
        "Forward": unary(calls.Forward, pb.ForwardRequest.FromString, pb.ForwardResponse.SerializeToString),
        "Execute": streaming(_Execute(calls), pb.ExecuteRequest.FromString, None),
    }
    server.add_registered_method_handlers(_SERVICE, handlers)
