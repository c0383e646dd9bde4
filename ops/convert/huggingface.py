"""A Hugging Face folder as a source: config.json, one or many safetensors files, tokenizer.json and what lies beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ops.container_layout import Json
from ops.convert.errors import ConvertError
from ops.convert.safetensors import SafetensorsFile
from ops.convert.source import Texts

F32: TypeAlias = NDArray[np.float32]

_GENERATION_KEYS = ("temperature", "top_p", "top_k", "bos_token_id", "eos_token_id", "pad_token_id")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# A folder with one of these means text, so a missing tokenizer.json is a fault; one without any is a model for token ids.
_OTHER_TOKENIZERS = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


class HuggingFaceSource:
    """See ops.convert.source.Source."""

    def __init__(self, path: Path) -> None:
        """`path`: the folder, or a single .safetensors file in it."""
        self.path = path
        self._folder = path if path.is_dir() else path.parent
        self._files: list[SafetensorsFile] = []
        self._by_tensor: dict[str, SafetensorsFile] = {}
        try:
            self.config = _json_file(self._folder / "config.json", missing="a Hugging Face checkpoint needs it")
            self.family = str(self.config.get("model_type", ""))
            if not self.family:
                raise ConvertError(f"{self._folder / 'config.json'}: model_type is missing")
            self._open_files()
        except BaseException:
            self.close()
            raise
        self.shapes = {name: file.tensors[name].shape for name, file in self._by_tensor.items()}

    def close(self) -> None:
        for file in self._files:
            file.close()

    def rows(self, name: str, start: int, stop: int) -> F32:
        return self._by_tensor[name].rows(name, start, stop)

    def where(self, name: str) -> str:
        return str(self._by_tensor[name].path) if name in self._by_tensor else str(self.path)

    def texts(self, *, with_tokenizer: bool) -> Texts:
        tokenizer = self._read("tokenizer.json") if with_tokenizer else ""
        if with_tokenizer and not tokenizer and any((self._folder / name).is_file() for name in _OTHER_TOKENIZERS):
            raise ConvertError(
                f"{self._folder / 'tokenizer.json'}: is missing; fetch it, name another with --tokenizer FILE, "
                "or go without: --tokenizer none"
            )
        config = self._optional_json("tokenizer_config.json")
        generation = {**self._config_generation(), **self._optional_json("generation_config.json")}
        readme = self._read("README.md")
        return Texts(
            tokenizer=tokenizer,
            chat_template=self._read("chat_template.jinja") or _template(config.get("chat_template")),
            config=self._read("config.json"),
            licence_name=_front_matter(readme, "license"),
            licence_text=self._read("LICENSE") or self._read("LICENSE.txt") or self._read("LICENSE.md"),
            name=self._folder.resolve().name,
            description=str(self.config.get("_name_or_path", "") or ""),
            generation={key: generation[key] for key in _GENERATION_KEYS if key in generation} | {"add_bos": config.get("add_bos_token")},
        )

    def _open_files(self) -> None:
        index = self._folder / _INDEX
        if self.path.is_file():
            self._add(self.path)
        elif (self._folder / _SINGLE).is_file():
            self._add(self._folder / _SINGLE)
        elif index.is_file():
            self._open_shards(index)
        else:
            raise ConvertError(f"{self._folder}: has neither {_SINGLE} nor {_INDEX}; other weight formats cannot be read")

    def _open_shards(self, index: Path) -> None:
        table = _json_file(index).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise ConvertError(f"{index}: has no weight_map")
        for shard in sorted({str(name) for name in table.values()}):
            if Path(shard).name != shard:
                raise ConvertError(f"{index}: names the file {shard!r}, which is not in its folder")
            self._add(self._folder / shard)
        for name, holder in table.items():
            file = self._by_tensor.get(name)
            if file is None or file.path.name != holder:
                raise ConvertError(f"{index}: says tensor {name} is in {holder}, it is not; fetch that file again")

    def _add(self, path: Path) -> None:
        file = SafetensorsFile(path)
        self._files.append(file)
        for name in file.tensors:
            if name in self._by_tensor:
                raise ConvertError(f"{path}: tensor {name} is also in {self._by_tensor[name].path}; remove the file that does not belong")
            self._by_tensor[name] = file

    def _config_generation(self) -> dict[str, Json]:
        return {key: self.config[key] for key in _GENERATION_KEYS if key in self.config and key.endswith("_id")}

    def _optional_json(self, name: str) -> Mapping[str, Json]:
        path = self._folder / name
        return _json_file(path) if path.is_file() else {}

    def _read(self, name: str) -> str:
        path = self._folder / name
        if not path.is_file():
            return ""
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConvertError(f"{path}: cannot be read: {error}") from error


def _json_file(path: Path, *, missing: str = "fetch the checkpoint again") -> dict[str, Json]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConvertError(f"{path}: is missing; {missing}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConvertError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConvertError(f"{path}: is no JSON object")
    return value


def _template(value: Json) -> str:
    """tokenizer_config.json holds one template, or a list of named ones of which "default" is the one for chat."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for row in value:
            if isinstance(row, dict) and row.get("name") == "default" and isinstance(row.get("template"), str):
                return str(row["template"])
    return ""


def _front_matter(readme: str, key: str) -> str:
    """A scalar of a model card's YAML head."""
    match = re.match(r"---\s*\n(.*?)\n---", readme, re.DOTALL)
    line = re.search(rf"^{key}:\s*[\"']?([^\"'\n]+)", match.group(1), re.MULTILINE) if match else None
    return line.group(1).strip() if line else ""
