"""An opened container, and what needs one to stay open."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Self

from engine_c._engine import ffi, lib
from engine_c.basics import EngineError, Part
from engine_c.library import Handle, fail

if TYPE_CHECKING:
    from engine_c._engine import Pointer
    from engine_c.structs import ModelInfo, PathLike


class Model(Handle):
    """An opened container: immutable, for any number of threads. Close it after the sessions and workers that use it."""

    _kind = "model"

    def __init__(self, pointer: Pointer) -> None:
        super().__init__(pointer, lib.colibri_model_close)
        self._scalars = ffi.new("colibri_model_info *", lib.colibri_model_get_info(pointer)[0])
        self.users = 0

    @cached_property
    def info(self) -> ModelInfo:
        """Its scalars, also once it is closed."""
        from engine_c.structs import ModelInfo  # here: workers do without, and start sooner

        return ModelInfo(**{name: getattr(self._scalars, name) for name in ModelInfo.__slots__})

    @classmethod
    def open(cls, path: PathLike) -> Self:
        """Opens a container file. EngineError EIO, EFORMAT, EUNSUPPORTED or ENOMEM."""
        out, err = ffi.new("colibri_model **"), ffi.new("colibri_error *")
        if lib.colibri_model_open(os.fsencode(path), out, err):
            raise fail(err)
        return cls(out[0])

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """Opens a container through a descriptor, which stays the caller's."""
        out, err = ffi.new("colibri_model **"), ffi.new("colibri_error *")
        if lib.colibri_model_open_fd(fd, out, err):
            raise fail(err)
        return cls(out[0])

    @classmethod
    def open_parts(cls, parts: Sequence[Part]) -> Self:
        """Opens a container whose parts, ascending and without gap, lie in descriptors that stay the caller's. EngineError also EINVAL."""
        out, err = ffi.new("colibri_model **"), ffi.new("colibri_error *")
        array = ffi.new("colibri_part[]", [(part.fd, part.node, part.offset, part.bytes) for part in parts])
        if lib.colibri_model_open_parts(array, len(parts), out, err):
            raise fail(err)
        return cls(out[0])

    def place(self, layer: int, expert: int, nodes: Sequence[int]) -> None:
        """Says on which nodes an expert, and each copy of it, lies: its tasks are then at home there. EngineError EINVAL, EUNSUPPORTED."""
        err = ffi.new("colibri_error *")
        if lib.colibri_model_place(self._pointer, layer, expert, ffi.new("int32_t[]", list(nodes)), len(nodes), err):
            raise fail(err)

    def remap(self, part: Part) -> None:
        """Maps a part's bytes, in this process, from its descriptor, which stays the caller's and must hold the same bytes: others may read
        them meanwhile. EngineError EINVAL, EIO, EFORMAT, ENOMEM."""
        err = ffi.new("colibri_error *")
        if lib.colibri_model_remap(self._pointer, ffi.new("colibri_part[]", [(part.fd, part.node, part.offset, part.bytes)]), err):
            raise fail(err)

    def close(self) -> None:
        """Unmaps the container. EngineError ESTATE while a session or worker uses it."""
        if self.users and not self.closed:
            raise EngineError(lib.COLIBRI_ESTATE, f"the model is used by {self.users} open sessions or workers: close them first")
        super().close()


class User(Handle):
    """What needs a model to stay open."""

    def __init__(self, pointer: Pointer, destructor: object, model: Model) -> None:
        super().__init__(pointer, destructor)
        self.model = model
        model.users += 1

    def close(self) -> None:
        """Frees it; a second call does nothing."""
        if not self.closed:
            super().close()
            self.model.users -= 1
