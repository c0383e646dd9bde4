"""What the front end itself needs of a container: its descriptor and the embedded texts. The engine reads the rest (docs/container.md)."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from service.config import ConfigError
from workers.layout import read_digest

_HEADER = struct.Struct("<8sIIQQQII")
_MAGIC = b"COLIBRI\0"
_VERSION = 1
_BYTE_ORDER = 0x01020304
_MAX_DESCRIPTOR = 64 << 20
_MAX_BLOB = 256 << 20
_ROUTER = re.compile(r"layers\.(\d+)\.router")


class ArtifactError(ConfigError):
    """The file is no container this version can serve; names file and cause."""


@dataclass(frozen=True, slots=True)
class Generation:
    """How the model's authors want it sampled, and the tokens with a role."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    add_bos: bool = False  # every text and chat begins with bos_token_id

    @property
    def first_token(self) -> int | None:
        """What a prompt must begin with, if with anything."""
        return self.bos_token_id if self.add_bos else None


@dataclass(frozen=True, slots=True)
class Artifact:
    """The texts of a container."""

    path: Path
    name: str
    quantisation: str
    generation: Generation = field(default_factory=Generation)
    licence: str = ""
    tokenizer: bytes | None = None
    chat_template: str | None = None
    routed_layers: tuple[int, ...] = ()  # numbers of the layers that have a router, ascending
    weighs_input: bool = False  # routers' weights multiply what experts read, not what they give
    digest: str = ""  # workers.layout.read_digest, of the file as it was when this was read


def read_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Reads header, descriptor and texts. Raises ArtifactError."""
    where = Path(path)
    try:
        with open(where, "rb", opener=_open_file) as file:
            return _read(where, file)
    except OSError as error:
        raise ArtifactError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, ValueError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{where}: the descriptor is malformed: {error!r}") from error


def _open_file(path: str, flags: int) -> int:
    """Refuses what is no file; a FIFO would be waited for and a device read for ever."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise ArtifactError(f"{path}: not a regular file; name a .colibri file")


def _read(path: Path, file: BinaryIO) -> Artifact:
    descriptor = _read_descriptor(path, file)
    blobs = descriptor.get("blobs", {})
    provenance = descriptor.get("provenance", {})
    router = descriptor.get("router")
    if not isinstance(blobs, Mapping) or not isinstance(provenance, Mapping):
        raise ArtifactError(f"{path}: the descriptor's blobs or provenance are no objects")
    template = _read_blob(path, file, blobs, "chat_template")
    return Artifact(
        path=path,
        name=str(descriptor["name"]),
        quantisation=str(descriptor.get("quant", "")),
        generation=_read_generation(descriptor.get("generation", {})),
        licence=str(provenance.get("licence") or ""),
        tokenizer=_read_blob(path, file, blobs, "tokenizer.json"),
        chat_template=None if template is None else template.decode(),
        routed_layers=_read_routed_layers(descriptor.get("tensors", ())),
        weighs_input=isinstance(router, Mapping) and router.get("apply_at") == "input",
        digest=read_digest(file.fileno()),
    )


def _read_descriptor(path: Path, file: BinaryIO) -> Mapping[str, object]:
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:8] != _MAGIC:
        raise ArtifactError(f"{path}: not a .colibri container; make one with `colibri convert`")
    _, version, order, offset, length, total, descriptor_crc, header_crc = _HEADER.unpack(head)
    if zlib.crc32(head[:44]) != header_crc or order != _BYTE_ORDER:
        raise ArtifactError(f"{path}: the header is damaged")
    if version != _VERSION:
        raise ArtifactError(f"{path}: container version {version}; this server reads version {_VERSION}")
    size = os.fstat(file.fileno()).st_size
    if total != size or length > _MAX_DESCRIPTOR or offset + length > size:
        raise ArtifactError(f"{path}: {size} bytes long, its header says {total}; the file is truncated or damaged")
    raw = _read_at(path, file, offset, length)
    if zlib.crc32(raw) != descriptor_crc:
        raise ArtifactError(f"{path}: the descriptor is damaged (checksum)")
    descriptor = json.loads(raw)
    if not isinstance(descriptor, Mapping):
        raise ArtifactError(f"{path}: the descriptor is no object")
    return descriptor


def _read_blob(path: Path, file: BinaryIO, blobs: Mapping[str, object], name: str) -> bytes | None:
    entry = blobs.get(name)
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise ArtifactError(f"{path}: the entry of {name} is no object")
    offset, length = int(entry["offset"]), int(entry["length"])
    if offset < 0 or not 0 <= length <= _MAX_BLOB:
        raise ArtifactError(f"{path}: {name} at offset {offset} with {length} bytes is out of range")
    return _read_at(path, file, offset, length)


def _read_at(path: Path, file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    data = file.read(length)
    if len(data) != length:
        raise ArtifactError(f"{path}: truncated: {length} bytes wanted at offset {offset}, {len(data)} there")
    return data


def _read_routed_layers(tensors: object) -> tuple[int, ...]:
    if not isinstance(tensors, Sequence):
        raise TypeError("tensors is no list")
    routers = [_ROUTER.fullmatch(str(tensor["name"])) for tensor in tensors]
    return tuple(sorted(int(match[1]) for match in routers if match))


def _read_generation(raw: object) -> Generation:
    if not isinstance(raw, Mapping):
        raise TypeError("generation is no object")
    bos = raw.get("bos_token_id")
    return Generation(
        temperature=float(raw.get("temperature") or 0.0) if raw.get("temperature") is not None else 1.0,
        top_p=float(raw.get("top_p") or 1.0),
        top_k=int(raw.get("top_k") or 0),
        eos_token_ids=tuple(int(token) for token in raw.get("eos_token_ids") or ()),
        bos_token_id=None if bos is None else int(bos),
        add_bos=raw.get("add_bos") is True,
    )
