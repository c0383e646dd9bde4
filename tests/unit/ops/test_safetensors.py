"""The safetensors reader: what is valid is read, everything else is refused with file, tensor and offset."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ops.convert.errors import ConvertError
from ops.convert.safetensors import SafetensorsFile
from tests.unit.ops.checkpoints import write_raw_safetensors, write_safetensors

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


def entry(dtype: str = "F32", shape: Any = (2, 3), span: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@settings(max_examples=40, deadline=None)
@given(all_shapes=st.lists(shapes, min_size=1, max_size=5), seed=st.integers(0, 1000), data=st.data())
def test_tensors_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, all_shapes: list[tuple[int, ...]], seed: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "valid.safetensors"
    rng = np.random.default_rng(seed)
    # Multiples of 1/8 below 16 are exact in all three types.
    tensors = {f"t{index}": (rng.integers(-99, 100, shape) / 8).astype(np.float32) for index, shape in enumerate(all_shapes)}
    write_safetensors(path, tensors, dtype=dtype)
    with contextlib.closing(SafetensorsFile(path)) as file:
        assert {name: stored.shape for name, stored in file.tensors.items()} == {name: values.shape for name, values in tensors.items()}
        for name, values in tensors.items():
            start = data.draw(st.integers(0, len(values)))
            stop = data.draw(st.integers(start, len(values)))
            if len(values):
                np.testing.assert_array_equal(file.rows(name, start, stop), values[start:stop])


def refused(path: Path) -> str:
    with pytest.raises(ConvertError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"w": entry(shape=(2, 4))}, "tensor w at offset {base} has 24 bytes, F32 of shape [2, 4] needs 32"),
        ({"w": entry(span=(0, 32), shape=(2, 4))}, "tensor w at offset {base} ends at"),
        ({"w": entry(span=(24, 0))}, "tensor w at offset"),
        ({"w": entry(span=(0, 1 << 63))}, "data_offsets"),
        ({"w": entry(span=((1 << 63) - 24, (1 << 63) - 1))}, "tensor w at offset"),
        ({"w": entry(span=(-24, 0))}, "data_offsets"),
        ({"w": entry(span=(0, 24, 48))}, "data_offsets"),
        ({"w": entry(span=(0.0, 24.0))}, "data_offsets"),
        ({"w": entry(shape=(1 << 63, 1))}, "shape"),
        ({"w": entry(shape=(1 << 62, 1 << 62))}, "needs"),
        ({"w": entry(shape=(1 << 32, 1 << 32, 0), span=(0, 24))}, "needs 0"),
        ({"w": entry(shape=(-2, -3))}, "shape"),
        ({"w": entry(shape=(True, 6))}, "shape"),
        ({"w": entry(dtype="F31")}, "'F31'"),
        ({"w": {"dtype": "F32"}}, "shape"),
        ({"w": 7}, "no JSON object"),
        ({"w": entry(), "v": entry()}, "overlaps the tensor before it"),
        ({"w": entry(shape=(4,), span=(0, 16)), "v": entry(shape=(4,), span=(8, 24))}, "tensor v at offset"),
        ({"w": entry(shape=(5,), span=(4, 24))}, "leaves a hole before it"),
        ({"w": entry(shape=(5,), span=(0, 20))}, "the tensors end at offset"),
        ({}, "the tensors end at offset"),
        ([], "no JSON object"),
        (b'{"w": ', "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"w": 1, "w": 2}', "w is in the header twice"),
        (b'{"w": {"dtype": "F32", "dtype": "F16"}}', "dtype is in the header twice"),
    ],
)
def test_lying_header_is_refused(tmp_path: Path, header: Any, says: str) -> None:
    path = tmp_path / "lie.safetensors"
    write_raw_safetensors(path, header, bytes(24))
    base = 8 + len(header if isinstance(header, bytes) else json.dumps(header))
    assert says.format(base=base) in refused(path)


@pytest.mark.parametrize("length", [1, 1 << 20, 100_000_001, 1 << 63, (1 << 64) - 1])
def test_lying_header_length_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "long.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    refused(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    write_safetensors(path, {"w": np.ones((4, 5), np.float32), "v": np.ones(3, np.float32)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(path)


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "shrinks.safetensors"
    write_safetensors(path, {"w": np.ones((400, 500), np.float32)})
    with contextlib.closing(SafetensorsFile(path)) as file:
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(ConvertError, match=r"tensor w ends at offset 1000.*truncated"):
            file.rows("w", 0, 400)


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.safetensors")


def test_types_that_are_no_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "int.safetensors"
    write_raw_safetensors(path, {"w": entry(dtype="I32")}, bytes(24))
    with contextlib.closing(SafetensorsFile(path)) as file, pytest.raises(ConvertError, match="tensor w is of type I32"):
        file.rows("w", 0, 2)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A damaged file is either refused by name or read within its bounds."""
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    write_safetensors(path, {"w": np.ones((2, 3), np.float32), "v": np.ones(4, np.float32)})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with contextlib.suppress(ConvertError), contextlib.closing(SafetensorsFile(path)) as file:
        for name, stored in file.tensors.items():
            if stored.shape and stored.shape[0]:
                assert file.rows(name, 0, stored.shape[0]).shape == stored.shape
