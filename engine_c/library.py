"""The C library: its errors as exceptions, what it says of itself, and objects of its that are freed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from engine_c._engine import ffi, lib
from engine_c.basics import EngineError

if TYPE_CHECKING:
    from engine_c._engine import Error, Pointer


def fail(err: Error) -> EngineError:
    """The exception for what the library wrote into err."""
    return EngineError(err.code, ffi.string(err.message).decode("utf-8", "replace"))


def text(pointer: Pointer) -> str:
    """A const char * of the library."""
    return ffi.string(pointer).decode()


OPERATIONS: tuple[str, ...] = tuple(text(lib.colibri_operation_name(i)) for i in range(lib.COLIBRI_OPS))
"""Names of what a step is made of, by enum colibri_operation."""


def version() -> str:
    """The engine's version."""
    return text(lib.colibri_version())


def isa_select(name: str | None) -> None:
    """Selects this process's kernels; None takes COLIBRI_ISA or the best there is. EngineError EUNSUPPORTED."""
    err = ffi.new("colibri_error *")
    if lib.colibri_isa_select(ffi.NULL if name is None else name.encode(), err):
        raise fail(err)


def isa_name() -> str:
    """The selected instruction set."""
    return text(lib.colibri_isa_name())


def isa_available() -> tuple[str, ...]:
    """Every instruction set this CPU runs, best first."""
    return tuple(text(lib.colibri_isa_available()).split(","))


class Handle:
    """An object of the library, freed once: by close(), or with the last reference to it."""

    _kind = "object"

    def __init__(self, pointer: Pointer, destructor: object) -> None:
        self._owned: Pointer | None = ffi.gc(pointer, destructor)

    @property
    def _pointer(self) -> Pointer:
        pointer = self._owned
        if pointer is None:
            raise EngineError(lib.COLIBRI_ESTATE, f"the {self._kind} is closed")
        return pointer

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._owned is None

    def close(self) -> None:
        """Frees it; a second call does nothing."""
        pointer, self._owned = self._owned, None
        if pointer is not None:
            ffi.release(pointer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
