"""The messages of an Experts.Execute stream, checked alike by nodes and by servers."""

from __future__ import annotations

from google.rpc.code_pb2 import Code

from colibri.v1 import experts_pb2 as pb
from engine_c import EngineError
from service.printable import printable
from service.wire import PROTOCOL

OPENING_S = 10.0
"""Seconds that a caller may take for the first message."""
_SHOWN = 64  # characters of a caller's words
_CODES = {"EINVAL": Code.INVALID_ARGUMENT, "ENOLANES": Code.UNAVAILABLE, "ENOMEM": Code.RESOURCE_EXHAUSTED}


class StreamRefused(Exception):
    """The two do not fit together. `code`: a gRPC status by name; `reason`: a short upper-case name of why."""

    def __init__(self, code: str, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.reason = reason


def caller_of(opening: pb.OpenStream) -> str:
    """Who opens a stream, by its own words."""
    return f"{printable(opening.front_end, most=_SHOWN) or 'a caller'} ({printable(opening.version, most=_SHOWN) or 'no version'})"


def check_opening(request: pb.ExecuteRequest, *, model: str, digest: str, here: str) -> bool:
    """Whether a stream that begins with this may send prepared rows. `here`: what answers, in words. StreamRefused."""
    if request.WhichOneof("kind") != "open":
        raise StreamRefused("INVALID_ARGUMENT", "BAD_STREAM", "the first message must open the stream")
    opening = request.open
    if opening.protocol not in (0, PROTOCOL):
        sentence = f"the caller speaks protocol {opening.protocol}, {here} {PROTOCOL}: run the same version on both"
        raise StreamRefused("FAILED_PRECONDITION", "VERSION_DIFFERS", sentence)
    if opening.model_digest not in ("", digest):
        theirs = printable(opening.model_digest, most=_SHOWN)
        sentence = f"the caller's model has digest {theirs}, that of {here} is {digest}: give both the same file"
        raise StreamRefused("FAILED_PRECONDITION", "MODEL_DIFFERS", sentence)
    if opening.model not in ("", model):
        raise StreamRefused("NOT_FOUND", "NO_SUCH_MODEL", f"there is no model {opening.model[:_SHOWN]!r} here, only {model}")
    return bool(opening.protocol and opening.model_digest)


def never_opened() -> StreamRefused:
    """Of a stream whose first message has not come within OPENING_S."""
    return StreamRefused("DEADLINE_EXCEEDED", "NOT_OPENED", f"the message that opens the stream has not come within {OPENING_S:g} s")


def stream_idle(seconds: float) -> StreamRefused:
    """Of an open stream whose caller has said nothing for so long."""
    sentence = f"nothing has been asked for over this stream for {seconds:g} s: open another when there is something to ask"
    return StreamRefused("DEADLINE_EXCEEDED", "STREAM_IDLE", sentence)


def batch_of(request: pb.ExecuteRequest) -> pb.ExpertBatch:
    """A later message of a stream. StreamRefused."""
    if request.WhichOneof("kind") != "batch":
        raise StreamRefused("INVALID_ARGUMENT", "BAD_STREAM", "only batches may follow the message that opens the stream")
    return request.batch


def failure_code(error: EngineError) -> int:
    """The google.rpc.Code of a batch that the engine did not compute."""
    return int(_CODES.get(error.name, Code.INTERNAL))
