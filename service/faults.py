"""What can go wrong with a request, in the domain's own words. `errors.py` turns these into gRPC status codes."""

from __future__ import annotations

from collections.abc import Sequence

_SENTENCE_BYTES = 600
_NAME_BYTES = 100


def shorten(text: str, most: int = _SENTENCE_BYTES) -> str:
    """At most so many UTF-8 bytes of a text. A status travels in HTTP/2 headers, escaped and more than once; beyond 8 KiB it is lost."""
    raw = text.encode()
    return text if len(raw) <= most else raw[: most - 3].decode(errors="ignore") + "..."


def shown(name: str) -> str:
    """What a caller named, quoted to be repeated to it."""
    return shorten(repr(name), _NAME_BYTES)


class Fault(Exception):
    """A request cannot be served. `str()` is one sentence for the caller that names the thing and the remedy."""

    def __init__(self, sentence: str) -> None:
        super().__init__(shorten(sentence))


class InvalidField(Fault):
    """A field of the request is wrong. `field` is its path in the request message."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(f"{field}: {sentence}")
        self.field = field
        self.sentence = shorten(sentence)


class UnreadableRequest(Fault):
    """The request's bytes are no message of the type that the method takes."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the request cannot be read: {cause}; is the client built from this server's protocol?")


class UnknownModel(Fault):
    """The named model is not served here."""

    def __init__(self, name: str, *, served: Sequence[str]) -> None:
        there = shorten(", ".join(map(repr, served)))
        super().__init__(f"model {shown(name)} is not served here; there is {there} (leave the name empty for the default)")
        self.name = shorten(name, _NAME_BYTES)


class QueueFull(Fault):
    """The queue has no room. Worth another try after `retry_after` seconds."""

    def __init__(self, sentence: str, *, retry_after: float) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after


class DeadlineUnmeetable(Fault):
    """The predicted wait is longer than the request's deadline; nothing was queued."""

    def __init__(self, *, predicted: float, remaining: float) -> None:
        super().__init__(f"the first token is about {predicted:.2f} s away, the deadline {remaining:.2f} s; try later or allow longer")
        self.predicted = predicted


class DeadlineExpired(Fault):
    """The request's deadline passed before it was done."""

    def __init__(self) -> None:
        super().__init__("the deadline passed before the request was done")


class Draining(Fault):
    """The server is on its way down and takes nothing new. Nothing of the request ran."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and takes no new requests; send it elsewhere")


class ShutDown(Fault):
    """The grace that the server, or its model, gave before it went ended before the request was done."""

    def __init__(self, *, ran: bool, what: str = "the server shut down") -> None:
        super().__init__(f"{what} before the request was done; send it again elsewhere")
        self.ran = ran


class WorkersLost(Fault):
    """Nothing is left that could compute, and nothing came back in time."""

    def __init__(self, *, ran: bool, sentence: str) -> None:
        super().__init__(f"no worker is left that could compute ({sentence}); try again")
        self.ran = ran


class NodesLost(Fault):
    """No node is left that holds some experts, and none came back in time."""

    def __init__(self, *, ran: bool, sentence: str) -> None:
        super().__init__(f"{sentence}; try again")
        self.ran = ran


class LayersElsewhere(Fault):
    """What is asked for needs every layer's router here, and nodes run some layers whole. Nothing of the request is told."""

    def __init__(self, layers: str, *, trace: bool) -> None:
        what = "where tokens go can't be told" if trace else "tokens can't be routed by a policy"
        remedy = "ask a server without such nodes" + ("" if trace else ", or leave routing out")
        super().__init__(f"{what} while nodes run layers {layers} whole; {remedy}")


class ClientTooSlow(Fault):
    """The client stopped reading and what it has not read reached the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the client left {limit} tokens unread; read the stream faster or ask for fewer tokens")


class EngineFault(Fault):
    """The engine could not do a step. Our own fault; `reason` is a short upper-case name of it."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class StreamMisfit(Fault):
    """A stream of mini-batches does not fit to what is served. `code` is a gRPC status by name, `reason` a short upper-case name of it."""

    def __init__(self, code: str, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.reason = reason


class OperatorFault(Fault):
    """An operator's wish is refused or did not work out. `code` is a gRPC status by name, `reason` a short upper-case name of it."""

    def __init__(self, code: str, reason: str, sentence: str, **metadata: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.reason = reason
        self.metadata = {key: shorten(value, _NAME_BYTES) for key, value in metadata.items()}
