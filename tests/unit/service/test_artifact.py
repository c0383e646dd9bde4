"""Reading a container's texts: what is there, and files that are no good."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

import pytest

from service.artifact import ArtifactError, read_artifact


def write(path: Path, descriptor: object, *, version: int = 1, magic: bytes = b"COLIBRI\0", total: int | None = None) -> Path:
    raw = descriptor if isinstance(descriptor, bytes) else json.dumps(descriptor).encode()
    length = 64 + len(raw)
    head = struct.pack("<8sIIQQQI", magic, version, 0x01020304, 64, len(raw), length if total is None else total, zlib.crc32(raw))
    path.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + bytes(16) + raw)
    return path


def test_the_texts_of_a_model_are_read(tiny_model: Path) -> None:
    artifact = read_artifact(tiny_model)
    assert artifact.quantisation == "int8"
    assert artifact.tokenizer is not None
    assert json.loads(artifact.tokenizer)["model"]["type"] == "BPE"
    assert "im_start" in (artifact.chat_template or "")
    assert artifact.generation.eos_token_ids == (0, 2)
    assert artifact.routed_layers == (0, 1, 2)


def test_layers_with_a_router_are_found_among_the_tensors(tmp_path: Path) -> None:
    names = ["embed", "layers.10.router", "layers.2.router", "layers.2.router_bias", "layers.3.o", "extra.layers.4.router"]
    assert read_artifact(write(tmp_path / "a.colibri", {"name": "x", "tensors": [{"name": name} for name in names]})).routed_layers == (
        2,
        10,
    )


def test_what_a_descriptor_leaves_out_has_defaults(tmp_path: Path) -> None:
    artifact = read_artifact(write(tmp_path / "a.colibri", {"name": "bare", "generation": {"top_k": None, "temperature": 0}}))
    assert (artifact.name, artifact.tokenizer, artifact.chat_template, artifact.licence) == ("bare", None, None, "")
    assert (artifact.generation.temperature, artifact.generation.top_p, artifact.generation.top_k) == (0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("descriptor", "how", "words"),
    [
        ({"name": "x"}, {"magic": b"GGUF\0\0\0\0"}, "not a .colibri container"),
        ({"name": "x"}, {"version": 9}, "container version 9"),
        ({"name": "x"}, {"total": 1 << 40}, "truncated or damaged"),
        ({}, {}, "malformed"),
        ([1], {}, "no object"),
        (b"{", {}, "malformed"),
        (b"\xff\xff", {}, "malformed"),
        ({"name": "x", "blobs": {"tokenizer.json": {"offset": 10, "length": 1 << 20}}}, {}, "truncated"),
        ({"name": "x", "blobs": {"tokenizer.json": {"offset": -1, "length": 1}}}, {}, "out of range"),
        ({"name": "x", "blobs": {"tokenizer.json": {"offset": 1}}}, {}, "malformed"),
        ({"name": "x", "blobs": {"tokenizer.json": 5}}, {}, "no object"),
        ({"name": "x", "blobs": 5}, {}, "no objects"),
        ({"name": "x", "generation": {"top_k": "many"}}, {}, "malformed"),
        ({"name": "x", "generation": 5}, {}, "no object"),
        ({"name": "x", "tensors": 5}, {}, "no list"),
        ({"name": "x", "tensors": [5]}, {}, "malformed"),
    ],
)
def test_a_bad_file_is_one_error_that_names_it(tmp_path: Path, descriptor: object, how: dict[str, object], words: str) -> None:
    path = write(tmp_path / "bad.colibri", descriptor, **how)  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match=words) as caught:
        read_artifact(path)
    assert "bad.colibri" in str(caught.value)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.colibri", {"name": "some-model"})
    for at in (20, 70):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        (tmp_path / "flipped.colibri").write_bytes(data)
        with pytest.raises(ArtifactError, match="damaged"):
            read_artifact(tmp_path / "flipped.colibri")


def test_a_fifo_or_a_device_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(ArtifactError, match=r"regular file|directory"):
            read_artifact(path)
