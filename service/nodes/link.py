"""One node: its channel, the stream that its batches go over, and what is asked of it besides. No threads of its own; `read` is for one."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import grpc

from colibri.v1 import experts_pb2 as pb, node_pb2, node_pb2_grpc
from service.printable import printable, with_printable_texts
from service.wire import PROTOCOL, disclose

HELLO_S = 3.0
"""Seconds for a node to say what it is, or to take the stream."""
_EXECUTE = f"/{pb.DESCRIPTOR.services_by_name['Experts'].full_name}/Execute"
_RESULT = pb.ExecuteResponse.DESCRIPTOR.fields_by_name["result"].number
_DATA = pb.ExpertResult.DESCRIPTOR.fields_by_name["data"].number
_ASSIGN = 120.0  # seconds for a node to read a new share
_NEWS_S = 1.0  # that a node keeps a question what it is, as long as nothing has changed
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED)  # of a stream that has not been taken
_LONGEST_SENTENCE = 400  # characters of what a node says of a failure
_MESSAGE_BYTES = 1 << 30  # of a batch or its answer
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    # Each attempt makes a channel of its own that really connects anew, at once.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


class Unreachable(Exception):
    """The node can't be had for now; the sentence says why. silent: for it says nothing at all."""

    def __init__(self, sentence: str, *, silent: bool = False) -> None:
        super().__init__(sentence)
        self.silent = silent


class Refused(Exception):
    """The node is there and must not be used; the sentence says why and what to do."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """Mutual TLS: this front end's certificate and key, the authority that signs nodes' certificates (PEM), and the name those are for."""

    cert: bytes
    key: bytes
    ca: bytes
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """What both sides must agree on, and what a node's log calls us. instance: of this process. kv_blocks, kv_format: of our KV cache, for
    nodes that run layers whole."""

    front_end: str
    model: str
    digest: str
    version: str
    isa: str
    instance: str = ""
    kv_blocks: int = 0
    kv_format: str = ""

    def why_not(self, node: node_pb2.NodeDescription) -> str:
        """Why a node must not compute for us, with the remedy; "" if it may."""
        if node.protocol != PROTOCOL:
            ours = f"this front end (release {self.version}) {PROTOCOL}"
            return f"it speaks protocol {node.protocol} (release {node.version}), {ours}: run one release on both"
        if node.model_digest != self.digest:
            theirs, ours = node.model_digest[:12] or "none", self.digest[:12]
            return f"its model {node.model!r} has the digest {theirs}, ours {ours}: give both the same file"
        if node.isa != self.isa and not node.expert_format.startswith("int"):
            return f"it computes {node.expert_format} with {node.isa}, we with {self.isa}, so bits would differ: set COLIBRI_ISA alike"
        return self._why_no_layers(node) if node.layer_ranges else ""

    def _why_no_layers(self, node: node_pb2.NodeDescription) -> str:
        if node.isa != self.isa:
            return f"it runs layers with {node.isa}, we with {self.isa}, so bits would differ: set COLIBRI_ISA alike"
        if node.kv_format != self.kv_format:
            return f"its KV cache is in {node.kv_format}, ours in {self.kv_format}, so bits would differ: set kv_format alike"
        if node.kv_blocks < self.kv_blocks:
            return f"it has {node.kv_blocks} KV blocks, we have {self.kv_blocks}: give the node more kv_memory, or us less"
        return ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came over a stream, its texts fit to be shown. data: that of a result, whose own field may be empty."""

    message: pb.ExecuteResponse
    data: bytes | memoryview = b""

    @classmethod
    def decode(cls, raw: bytes) -> Answer:
        """DecodeError."""
        rest, data = disclose(raw, _RESULT, _DATA)
        message = pb.ExecuteResponse.FromString(rest)
        if message.HasField("opened"):
            with_printable_texts(message.opened)
        elif message.HasField("failed"):
            message.failed.message = printable(message.failed.message, most=_LONGEST_SENTENCE)
        return cls(message, data or message.result.data)


Told = Callable[[Answer], None]


class Link:
    """From one attempt to its end; a node that comes back gets another. `open` first, then `read` until it returns. What the node says,
    descriptions and reasons, leaves here fit to be shown."""

    def __init__(self, address: str, secrets: Secrets | None, key: int) -> None:
        self.address = address
        self.key = key  # of this stream, once and never again
        self.description = node_pb2.NodeDescription()
        self.error = ""  # why we ended it ourselves
        self.refused = False  # it ended the stream since it must not be used as it is
        self._channel = _channel(address, secrets)
        self._node = node_pb2_grpc.NodeStub(self._channel)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call: grpc._CallIterator[Answer] | None = None
        self._asking: grpc.Future[node_pb2.NodeDescription] | None = None

    # ------------------------------------------------------------ the link's own thread

    def describe(self) -> node_pb2.NodeDescription:
        """Asks the node what it is. Unreachable."""
        with _in_words():
            self.description = with_printable_texts(self._node.Describe(node_pb2.DescribeRequest(), timeout=HELLO_S))
        return self.description

    def open(self, identity: Identity, *, timeout: float | None = None) -> None:
        """Opens the stream; `read` then tells what the node says to it. timeout: seconds after which it ends by itself."""
        opening = pb.OpenStream(
            model_digest=identity.digest,
            protocol=PROTOCOL,
            version=identity.version,
            front_end=identity.front_end,
            kv_blocks=identity.kv_blocks if self.description.layer_ranges else 0,
            kv_format=identity.kv_format,
            instance=identity.instance,
        )
        self._outgoing.put(pb.ExecuteRequest(open=opening).SerializeToString())
        with _in_words():
            execute: grpc.StreamStreamMultiCallable[bytes, Answer] = self._channel.stream_stream(_EXECUTE, None, Answer.decode)
            self._call = execute(iter(self._outgoing.get, None), timeout=timeout)

    def read(self, told: Told) -> str:
        """Hands on every answer until the stream ends; returns why. The first answer is the node's word that it has taken the stream."""
        assert self._call is not None
        try:
            for answer in self._call:
                told(answer)
            return self.error or "it ended the stream"
        except grpc.RpcError as error:
            self.refused = error.code() in _REFUSALS
            return self.error or _words(error)

    # ------------------------------------------------------------ any thread

    def send(self, request: bytes) -> None:
        """Hands an encoded ExecuteRequest over; returns at once."""
        self._outgoing.put(request)

    def ask(self, told: Callable[[node_pb2.NodeDescription], None], again: Callable[[], None], *, known: int, timeout: float) -> None:
        """Asks again what the node is, and gives it up if it does not say. It keeps the question while its revision is the known one, for a
        second, `timeout` more at the most. `told`, then `again`, are called on a thread of gRPC's."""
        if self.waits:
            return
        asked = time.monotonic()

        def done(future: grpc.Future[node_pb2.NodeDescription]) -> None:
            try:
                description = with_printable_texts(future.result())
            except grpc.RpcError as error:
                self.end(f"it does not say any more what it is: {_words(error)}")
            except grpc.FutureCancelledError:
                return
            else:
                told(description)
                if asks_again(description.revision, known=known, waited=time.monotonic() - asked):
                    again()

        with contextlib.suppress(ValueError):  # closed meanwhile
            request = node_pb2.DescribeRequest(revision=known, wait_ms=int(1e3 * _NEWS_S))
            self._asking = self._node.Describe.future(request, timeout=timeout + _NEWS_S)
            self._asking.add_done_callback(done)

    @property
    def waits(self) -> bool:
        """Whether the node has been asked for news and has yet to answer."""
        return self._asking is not None and not self._asking.done()

    def assign(self, shares: Mapping[int, Sequence[int]]) -> node_pb2.NodeDescription:
        """Gives the node the experts to hold, by layer; returns when it has them. Unreachable."""
        request = node_pb2.AssignRequest()
        for layer in sorted(shares):
            request.shares.add(layer=layer, experts=sorted(shares[layer]))
        with _in_words():
            return with_printable_texts(self._node.Assign(request, timeout=_ASSIGN))

    def end(self, reason: str) -> None:
        """Ends the stream, whatever is under way on it; `read` returns the reason."""
        self.error = self.error or reason
        self._outgoing.put(None)
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """Frees everything."""
        self.end("it was closed")
        self._channel.close()


def asks_again(revision: int, *, known: int, waited: float) -> bool:
    """Whether a node that has answered after so many seconds is asked anew at once: not if it keeps no questions, or goes back."""
    return revision > known or waited > _NEWS_S / 2


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise Refused("it is no node: start it by `colibri node`") from error
        raise Unreachable(_words(error), silent=error.code() is grpc.StatusCode.DEADLINE_EXCEEDED) from error
    except ValueError as error:
        raise Unreachable("the channel was closed") from error


def _channel(address: str, secrets: Secrets | None) -> grpc.Channel:
    if secrets is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    options = list(_OPTIONS)
    if secrets.server_name:
        options.append(("grpc.ssl_target_name_override", secrets.server_name))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(secrets.ca, secrets.key, secrets.cert), options=options)


def _words(error: grpc.RpcError) -> str:
    code, details = error.code(), printable(error.details() or "", most=_LONGEST_SENTENCE)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.trailing_metadata():  # else the node itself ended the stream
        return "it did not answer in time"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return f"a batch is too long for it: {details}; start it with a larger max_message_bytes"
    return f"{code.name}: {details}" if details else str(code.name)
