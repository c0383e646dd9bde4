"""A GGUF file as a source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ops.container_layout import Json
from ops.convert.errors import ConvertError
from ops.convert.gguf_file import GGUFFile
from ops.convert.gguf_spm import with_defaults
from ops.convert.gguf_tokenizer import rebuild_tokenizer
from ops.convert.source import Texts

F32: TypeAlias = NDArray[np.float32]


class GGUFSource:
    """See ops.convert.source.Source."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or metadata.get("split.count") not in (None, 0, 1):
            self.close()
            if isinstance(architecture, str):
                raise ConvertError(f"{path}: is one of {metadata['split.count']} pieces; merge them first (llama-gguf-split --merge)")
            raise ConvertError(f"{path}: the setting general.architecture is missing")
        self.family = f"gguf:{architecture}"
        self.config = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.ggml.")}
        self.config |= _scaling(architecture, metadata)
        self.shapes = {name: stored.shape for name, stored in self._file.tensors.items()}

    def close(self) -> None:
        self._file.close()

    def rows(self, name: str, start: int, stop: int) -> F32:
        return self._file.rows(name, start, stop)

    def where(self, name: str) -> str:
        return str(self.path)

    def texts(self, *, with_tokenizer: bool) -> Texts:
        metadata = self._file.metadata
        has_tokenizer = metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")
        return Texts(
            tokenizer=rebuild_tokenizer(self.path, metadata) if with_tokenizer and has_tokenizer else "",
            chat_template=_text(metadata.get("tokenizer.chat_template")),
            config=json.dumps(self.config, indent=1, ensure_ascii=False),
            licence_name=_text(metadata.get("general.license")),
            name=self.path.stem,
            description=_text(metadata.get("general.name")),
            generation=_generation(with_defaults(metadata)),
        )


def _scaling(architecture: str, metadata: dict[str, Json]) -> dict[str, Json]:
    """GGUF spreads rotary scaling over several keys; here it becomes one object as in config.json."""
    prefix = f"{architecture}.rope.scaling"
    kind = metadata.get(f"{prefix}.type")
    if kind in (None, "none"):
        return {}
    if kind != "linear":
        return {prefix: {"rope_type": f"{kind} (GGUF)"}}
    return {prefix: {"rope_type": "linear", "factor": metadata.get(f"{prefix}.factor")}}


def _generation(metadata: dict[str, Json]) -> dict[str, Json]:
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return {
        "eos_token_id": [end for end in dict.fromkeys(ends) if end is not None],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "add_bos": metadata.get("tokenizer.ggml.add_bos_token"),
    }


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""
