"""What workers need of the engine's plain values. Without dataclasses: importing those takes as long as all else a worker starts with."""

from __future__ import annotations

from typing import NamedTuple

STATUS_NAMES = {
    1: "NEEDS_REMOTE",
    0: "OK", -1: "EINVAL", -2: "EIO", -3: "EFORMAT", -4: "ENOMEM", -5: "EUNSUPPORTED", -6: "ENUMERIC", -7: "ENOLANES", -8: "ESTATE",
}


class EngineError(RuntimeError):
    """A refusal of the engine: `code` is an enum colibri_status, `name` its short name ("EFORMAT"), str() the sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.name = STATUS_NAMES.get(code, f"E{-code}")

    def __reduce__(self) -> tuple[type[EngineError], tuple[int, str]]:
        return EngineError, (self.code, str(self))


class Part(NamedTuple):
    """A piece of a container (colibri_part): bytes [offset, offset + bytes) of it, at the same offset of fd; node -1: on none."""

    fd: int
    node: int
    offset: int
    bytes: int
