"""Reading and writing containers: round trips, damage, and nothing left behind."""

from __future__ import annotations

import errno
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import engine_c
from engine_c.packing import pack, unpack
from ops.container import Container, ContainerError, ContainerWriter, dequantise_container
from ops.container_layout import HEADER_BYTES
from ops.random_model import SHAPES, make_model
from tests.unit.ops.layout_reference import decode_expert

DESCRIPTOR: dict[str, Any] = {"name": "test", "requires": [], "arch": {"layers": 2, "experts": 3}}


def matrix(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def write_sample(path: Path, fmt: str = "int8") -> None:
    with ContainerWriter(path, DESCRIPTOR) as writer:
        writer.add_blob("tokenizer.json", b"{}")
        writer.add_plain("final_norm", matrix(70))
        writer.add_packed("embed", fmt, matrix(100, 70))
        writer.add_expert(1, 2, fmt, matrix(40, 70), matrix(40, 70, seed=1), matrix(70, 40))
        writer.commit()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a whole small model, which the engine accepts."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.colibri"
    make_model(path, SHAPES["tiny"], quant="int4")
    return path.read_bytes()


@pytest.mark.parametrize("fmt", ["f32", "bf16", "int8", "int4"])
def test_written_tensors_are_read_back(tmp_path: Path, fmt: str) -> None:
    path = tmp_path / "a.colibri"
    write_sample(path, fmt)
    with Container.open(path) as container:
        np.testing.assert_array_equal(container.dequantise("final_norm")[0], matrix(70))
        stored = pack(fmt, matrix(100, 70))
        assert container.tensor("embed") == stored.tobytes()
        np.testing.assert_array_equal(container.dequantise("embed")[0], unpack(fmt, stored, 100, 70))
        expert = container.dequantise("layers.1.experts.2")
        for ours, expected in zip(expert, decode_expert(fmt, container.tensor("layers.1.experts.2"), 70, 40), strict=True):
            np.testing.assert_array_equal(ours, expected)
        assert container.blob("tokenizer.json") == b"{}"
        assert [entry.format for entry in container.tensors.values()] == ["f32", fmt, fmt]
        assert all(entry.offset % (64 if entry.layout == "plain" else 4096) == 0 for entry in container.tensors.values())
        with pytest.raises(ContainerError, match="no tensor nothing"):
            container.tensor("nothing")


def test_dequantised_container_holds_what_the_engine_reads(tmp_path: Path, tiny: bytes) -> None:
    source, out = tmp_path / "tiny.colibri", tmp_path / "tiny-f32.colibri"
    source.write_bytes(tiny)
    dequantise_container(source, out)
    engine_c.Model.open(out).close()
    with Container.open(source) as quantised, Container.open(out) as plain:
        assert plain.descriptor["quant"] == "f32"
        assert {entry.format for entry in plain.tensors.values()} == {"f32"}
        assert plain.blob("tokenizer.json") == quantised.blob("tokenizer.json")
        assert list(plain.tensors) == list(quantised.tensors)
        for name in quantised.tensors:
            for ours, theirs in zip(plain.dequantise(name), quantised.dequantise(name), strict=True):
                np.testing.assert_array_equal(ours, theirs)


# ---------------------------------------------------------------- damage


def refused(path: Path, data: bytes) -> str:
    """What Container.open says to a file of `data`; the engine must refuse it too."""
    path.write_bytes(data)
    with pytest.raises(ContainerError) as caught:
        Container.open(path)
    assert str(path) in str(caught.value)
    with pytest.raises(engine_c.EngineError):
        engine_c.Model.open(path)
    return str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path, tiny: bytes) -> None:
    path = tmp_path / "cut.colibri"
    for length in [*range(66), 1000, 4096, len(tiny) // 2, len(tiny) - 1]:
        refused(path, tiny[:length])
    assert "truncated" in refused(path, tiny[:-1])
    assert "truncated or overwritten" in refused(path, tiny + b"\0")


def test_every_damaged_header_byte_is_noticed(tmp_path: Path, tiny: bytes) -> None:
    for position in range(48):
        damaged = bytearray(tiny)
        damaged[position] ^= 0x10
        refused(tmp_path / "header.colibri", bytes(damaged))


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_damaged_descriptor_is_noticed(tmp_path_factory: pytest.TempPathFactory, tiny: bytes, position: int, bit: int) -> None:
    length = struct.unpack_from("<Q", tiny, 24)[0]
    damaged = bytearray(tiny)
    damaged[HEADER_BYTES + position % length] ^= 1 << bit
    assert "damaged (checksum)" in refused(tmp_path_factory.getbasetemp() / "descriptor.colibri", bytes(damaged))


def with_descriptor(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with a changed descriptor and checksums that fit it: what a hostile or faulty writer would make."""
    length = struct.unpack_from("<Q", data, 24)[0]
    descriptor = json.loads(data[HEADER_BYTES : HEADER_BYTES + length])
    change(descriptor)
    text = json.dumps(descriptor, separators=(",", ":")).encode()
    fixed = struct.pack("<8sIIQQQI", b"COLIBRI\0", 1, 0x01020304, HEADER_BYTES, len(text), len(data), zlib.crc32(text))
    region = descriptor["tensors"][0]["offset"] if descriptor.get("tensors") else HEADER_BYTES + len(text)
    head = (fixed + struct.pack("<I", zlib.crc32(fixed))).ljust(HEADER_BYTES, b"\0") + text
    return head + data[len(head) :] if len(head) <= max(region, HEADER_BYTES + length) else head.ljust(len(data), b"\0")


def tensor(descriptor: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in descriptor["tensors"] if row["name"] == name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: tensor(d, "embed").update(offset=1 << 63), "embed: offset"),
        (lambda d: tensor(d, "embed").update(length=(1 << 63) - 1), "embed: length"),
        (lambda d: tensor(d, "embed").update(offset=-4096), "embed: offset"),
        (lambda d: tensor(d, "embed").update(offset=0), "embed at offset 0"),
        (lambda d: tensor(d, "embed").update(shape=[1 << 31, 1 << 31]), "embed: shape"),
        (lambda d: tensor(d, "embed").update(shape=[512, 97]), "embed at offset"),
        (lambda d: tensor(d, "embed").update(shape=[0, 96]), "embed: shape"),
        (lambda d: tensor(d, "embed").update(shape=[512.0, 96]), "embed: shape"),
        (lambda d: tensor(d, "embed").update(format="int5"), "int5"),
        (lambda d: tensor(d, "embed").update(layout="p64"), "p64"),
        (lambda d: tensor(d, "embed").update(format="int4"), "embed at offset"),
        (lambda d: tensor(d, "embed").update(offset=tensor(d, "head")["offset"]), "overlaps"),
        (lambda d: tensor(d, "embed").update(offset=tensor(d, "embed")["offset"] + 64), "not aligned to 4096"),
        (lambda d: tensor(d, "head").update(name="embed"), "embed is listed twice"),
        (lambda d: tensor(d, "head").update(name=7), "no name"),
        (lambda d: d.update(tensors={}), "no tensor table"),
        (lambda d: d["blobs"]["tokenizer.json"].update(length=1 << 62), "tokenizer.json: length"),
    ],
)
def test_lying_table_is_refused(tmp_path: Path, tiny: bytes, change: Callable[[dict[str, Any]], None], says: str) -> None:
    assert says in refused(tmp_path / "lie.colibri", with_descriptor(tiny, change))


def test_unchanged_descriptor_still_opens(tmp_path: Path, tiny: bytes) -> None:
    """The changes above are refused for themselves and not for the way they are made."""
    path = tmp_path / "same.colibri"
    path.write_bytes(with_descriptor(tiny, lambda descriptor: None))
    Container.open(path).close()
    engine_c.Model.open(path).close()


# ---------------------------------------------------------------- writing


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"
    path.write_bytes(b"old")

    def fail_halfway() -> None:
        with ContainerWriter(path, DESCRIPTOR) as writer:
            writer.add_plain("final_norm", matrix(70))
            assert len(left(tmp_path)) == 2
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail_halfway()
    assert path.read_bytes() == b"old"
    assert left(tmp_path) == ["a.colibri"]


def test_success_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.colibri"
    path.write_bytes(b"old")
    write_sample(path)
    Container.open(path).close()
    assert left(tmp_path) == ["a.colibri"]


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with ContainerWriter(tmp_path / "a.colibri", DESCRIPTOR) as writer:
        writer.add_plain("final_norm", matrix(70))
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (lambda writer: writer.add_plain("norm", np.array([1, np.nan], np.float32)), "norm holds NaN"),
        (lambda writer: [writer.add_plain("norm", matrix(4)) for _ in range(2)], "norm was added twice"),
        (lambda writer: [writer.add_blob("licence", b"x") for _ in range(2)], "licence was added twice"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, add: Callable[[ContainerWriter], object], says: str) -> None:
    with pytest.raises(ContainerError, match=says), ContainerWriter(tmp_path / "a.colibri", DESCRIPTOR) as writer:
        add(writer)
    assert left(tmp_path) == []


def test_unwritable_targets_are_named(tmp_path: Path) -> None:
    for path, says in ((tmp_path, "is a folder"), (tmp_path / "no" / "a.colibri", "is no folder")):
        with pytest.raises(ContainerError, match=says), ContainerWriter(path, DESCRIPTOR):
            pass
    assert left(tmp_path) == []


# ---------------------------------------------------------------- full disk


def test_disk_that_is_too_small_is_refused_before_writing(small_disk: Path) -> None:
    path = small_disk / "a.colibri"
    with pytest.raises(ContainerError, match=r"needs 5 MB, .* has 1 MB free"), ContainerWriter(path, DESCRIPTOR, needed_bytes=5_000_000):
        pass
    assert left(small_disk) == []


def test_disk_that_fills_up_leaves_nothing(small_disk: Path) -> None:
    path = small_disk / "a.colibri"

    def fill() -> None:
        with ContainerWriter(path, DESCRIPTOR) as writer:
            for index in range(20):
                writer.add_plain(f"norm{index}", matrix(25_000))

    with pytest.raises(ContainerError, match="the disk is full") as caught:
        fill()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert left(small_disk) == []


def test_disk_that_is_full_at_once_leaves_nothing(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(1 << 20))
    with pytest.raises(ContainerError, match="the disk is full"):
        write_sample(small_disk / "a.colibri")
    assert left(small_disk) == ["filler"]
