"""One node: its channel, the stream that its mini-batches go over, and the thread that reads the answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from colibri.v1 import experts_pb2 as pb, experts_pb2_grpc, node_pb2, node_pb2_grpc

PROTOCOL = 1
"""Of the Execute stream; both sides must have the same."""
_HELLO = 3.0  # seconds for a node to say what it is, or to take the stream
_ASSIGN = 120.0  # seconds for a node to read a new share
_OPTIONS = [
    ("grpc.max_receive_message_length", 1 << 30),
    ("grpc.max_send_message_length", 1 << 30),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Refused(Exception):
    """The node can't be used; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """Mutual TLS: this front end's certificate and key, the authority that signs nodes' certificates (PEM), and the name those are for."""

    cert: bytes
    key: bytes
    ca: bytes
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node must agree on."""

    front_end: str
    model: str
    digest: str
    version: str


Answered = Callable[["Link", pb.ExecuteResponse | None, str], None]
"""Called on the link's own thread with each answer; None: the stream has ended, for the reason given."""


class Link:
    """From a place to its end; a node that comes back gets another. `describe` first, then `open`."""

    def __init__(self, address: str, secrets: Secrets | None) -> None:
        self.address = address
        self.description = node_pb2.NodeDescription()
        self._channel = _channel(address, secrets)
        self._outgoing: queue.SimpleQueue[pb.ExecuteRequest | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._call: grpc.Call | None = None
        self.open_for_use = False

    @property
    def name(self) -> str:
        """The node's own."""
        return self.description.name

    def describe(self) -> node_pb2.NodeDescription:
        """Asks the node what it is. Refused."""
        stub = node_pb2_grpc.NodeStub(self._channel)
        try:
            self.description = stub.Describe(node_pb2.DescribeRequest(), timeout=_HELLO)
        except grpc.RpcError as error:
            raise Refused(_words(error)) from error
        return self.description

    def assign(self, shares: dict[int, tuple[int, ...]]) -> None:
        """Gives the node the experts to hold, by layer; returns when it has them. Refused."""
        request = node_pb2.AssignRequest()
        for layer, experts in shares.items():
            request.shares.add(layer=layer, experts=experts)
        try:
            self.description = node_pb2_grpc.NodeStub(self._channel).Assign(request, timeout=_ASSIGN)
        except grpc.RpcError as error:
            raise Refused(_words(error)) from error

    def open(self, identity: Identity, answered: Answered) -> None:
        """Opens the stream and waits until the node has agreed. Refused."""
        opening = pb.OpenStream(
            model=identity.model, model_digest=identity.digest, protocol=PROTOCOL, version=identity.version, front_end=identity.front_end
        )
        self._outgoing.put(pb.ExecuteRequest(open=opening))
        call = experts_pb2_grpc.ExpertsStub(self._channel).Execute(self._requests())
        self._call = call
        agreed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(call, agreed, answered), name=f"node-{self.name}", daemon=True)
        self._reader.start()
        try:
            refusal = agreed.get(timeout=_HELLO)
        except queue.Empty:
            refusal = f"it did not take the stream within {_HELLO:g} s"
        if refusal:
            self.close()
            raise Refused(refusal)

    def send(self, request: pb.ExecuteRequest) -> None:
        """Hands a message over; returns at once."""
        self._outgoing.put(request)

    def close(self) -> None:
        """Ends the stream, whatever is under way. May be called more than once, and by the link's own thread."""
        self.open_for_use = False
        self._outgoing.put(None)
        if self._call is not None:
            self._call.cancel()
        self._channel.close()

    def _requests(self) -> Iterator[pb.ExecuteRequest]:
        while (request := self._outgoing.get()) is not None:
            yield request

    def _read(self, call: Iterator[pb.ExecuteResponse], agreed: queue.SimpleQueue[str], answered: Answered) -> None:
        reason = "the node ended the stream"
        try:
            for response in call:
                if response.WhichOneof("kind") == "opened":
                    self.open_for_use = True
                    agreed.put("")
                else:
                    answered(self, response, "")
        except grpc.RpcError as error:
            reason = _words(error)
        except ValueError:  # the channel was closed before the stream began
            pass
        self.open_for_use = False
        agreed.put(reason)
        answered(self, None, reason)


def _channel(address: str, secrets: Secrets | None) -> grpc.Channel:
    if secrets is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    options = list(_OPTIONS)
    if secrets.server_name:
        options.append(("grpc.ssl_target_name_override", secrets.server_name))  # type: ignore[arg-type]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(secrets.ca, secrets.key, secrets.cert), options=options)


def _words(error: grpc.RpcError) -> str:
    code, details = error.code(), error.details()
    return f"{code.name}: {details}" if details else str(code.name)
