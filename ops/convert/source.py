"""What the converter wants of a checkpoint, whatever its file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ops.container_layout import Json

F32: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Texts:
    """What goes into the container beside the weights. `tokenizer` is the text of a tokenizer.json, "" if the source has none."""

    tokenizer: str = ""
    chat_template: str = ""
    config: str = ""
    licence_name: str = ""
    licence_text: str = ""
    name: str = ""
    description: str = ""
    generation: Mapping[str, Json] = field(default_factory=dict)


class Source(Protocol):
    """A checkpoint: settings by key, tensors by name, read a range of rows at a time."""

    @property
    def path(self) -> Path: ...

    @property
    def family(self) -> str:
        """What chooses the family table: config.json's model_type, or "gguf:" and the architecture."""

    @property
    def config(self) -> Mapping[str, Json]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor names and shapes, rows first."""

    def rows(self, name: str, start: int, stop: int) -> F32:
        """Rows start..stop-1 of a tensor along its first axis, as f32 (a fresh array). Raises ConvertError naming file and tensor."""

    def where(self, name: str) -> str:
        """The file a tensor is in, for messages."""

    def texts(self, *, with_tokenizer: bool) -> Texts:
        """Tokenizer, chat template, licence and so on. Without `with_tokenizer` the tokenizer is not even looked at."""

    def close(self) -> None: ...
