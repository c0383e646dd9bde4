"""The messages of an Experts.Execute stream, checked alike by nodes and by servers."""

from __future__ import annotations

from google.rpc.code_pb2 import Code

from colibri.v1 import experts_pb2 as pb
from engine_c import EngineError
from service.wire import PROTOCOL

_CODES = {"EINVAL": Code.INVALID_ARGUMENT, "ENOLANES": Code.UNAVAILABLE, "ENOMEM": Code.RESOURCE_EXHAUSTED}


class StreamRefused(Exception):
    """The two do not fit together. `code`: a gRPC status by name; `reason`: a short upper-case name of why."""

    def __init__(self, code: str, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.reason = reason


def check_opening(request: pb.ExecuteRequest, *, model: str, digest: str, here: str) -> bool:
    """Whether a stream that begins with this may send prepared rows. `here`: what answers, in words. StreamRefused."""
    if request.WhichOneof("kind") != "open":
        raise StreamRefused("INVALID_ARGUMENT", "BAD_STREAM", "the first message must open the stream")
    opening = request.open
    if opening.protocol not in (0, PROTOCOL):
        sentence = f"the caller speaks protocol {opening.protocol}, {here} {PROTOCOL}: run the same version on both"
        raise StreamRefused("FAILED_PRECONDITION", "VERSION_DIFFERS", sentence)
    if opening.model_digest not in ("", digest):
        sentence = f"the caller's model has digest {opening.model_digest[:64]}, that of {here} is {digest}: give both the same file"
        raise StreamRefused("FAILED_PRECONDITION", "MODEL_DIFFERS", sentence)
    if opening.model not in ("", model):
        raise StreamRefused("NOT_FOUND", "NO_SUCH_MODEL", f"there is no model {opening.model[:64]!r} here, only {model}")
    return bool(opening.protocol and opening.model_digest)


def batch_of(request: pb.ExecuteRequest) -> pb.ExpertBatch:
    """A later message of a stream. StreamRefused."""
    if request.WhichOneof("kind") != "batch":
        raise StreamRefused("INVALID_ARGUMENT", "BAD_STREAM", "only batches may follow the message that opens the stream")
    return request.batch


def failure_code(error: EngineError) -> int:
    """The google.rpc.Code of a batch that the engine did not compute."""
    return int(_CODES.get(error.name, Code.INTERNAL))
