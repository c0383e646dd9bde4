"""`verify` finds every damaged byte and names its tensor; `inspect` says what a container holds."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ops.container import Container, ContainerError, ContainerWriter
from ops.inspect import describe
from ops.random_model import SHAPES, make_model
from ops.verify import verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_model(tmp_path / "m.colibri", SHAPES["tiny"], quant="int4")
    return tmp_path / "m.colibri"


def test_whole_container_is_whole(path: Path) -> None:
    report = verify(path)
    with Container.open(path) as container:
        assert (report.tensors, report.blobs) == (len(container.tensors), len(container.blobs))
        entries = [*container.tensors.values(), *container.blobs.values()]
        assert report.bytes_read == sum(entry.length for entry in entries)
    assert str(report).startswith("whole: ")


@pytest.mark.parametrize("name", ["embed", "layers.1.qkv", "layers.2.experts.3", "final_norm"])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_one_flipped_bit_is_found_and_named(path: Path, name: str, place: float) -> None:
    with Container.open(path) as container:
        entry = container.entry(name)
    data = bytearray(path.read_bytes())
    data[entry.offset + int(place * (entry.length - 1))] ^= 1
    path.write_bytes(data)
    with pytest.raises(ContainerError, match=f"tensor {name} at offset {entry.offset}, .* is damaged"):
        verify(path)
    describe(path)  # reads no weights


def test_damaged_blob_is_named(path: Path) -> None:
    with Container.open(path) as container:
        offset = container.blobs["tokenizer.json"].offset
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(ContainerError, match=f"blob tokenizer.json at offset {offset}, .* is damaged"):
        verify(path)


def test_truncated_file_is_one_clear_error_for_both(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    for tool in (verify, describe):
        with pytest.raises(ContainerError, match="truncated"):
            tool(path)


def test_whole_bytes_of_a_model_that_cannot_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.colibri"
    with ContainerWriter(path, {"name": "half", "arch": {"layers": 1, "experts": 1}, "router": {}}) as writer:
        writer.add_plain("final_norm", np.ones(8, np.float32))
        writer.commit()
    with pytest.raises(ContainerError, match="the bytes are whole, but the engine does not accept the model"):
        verify(path)


def test_description_holds_the_facts(tmp_path: Path) -> None:
    path = tmp_path / "m.colibri"
    make_model(path, replace(SHAPES["tiny"], sliding_window=9), quant="int4", seed=5)
    description = describe(path)
    assert description.sections["architecture"]["sliding_window"] == "9"
    assert description.sections["architecture"]["rope.style"] == "half"
    assert description.sections["router"]["k"] == "2"
    assert description.sections["provenance"]["licence"] == "Apache-2.0"
    assert description.sections["weights"]["asked for"] == "int4"
    assert {"experts, int4", "attention, int4", "embedding, int8", "head, int8", "router, f32"} <= description.sections["weights"].keys()
    with Container.open(path) as container:
        experts = [entry for entry in container.tensors.values() if entry.layout == "expert"]
        assert description.sections["weights"]["experts, int4"] == f"{sum(entry.length for entry in experts)} bytes in 12 tensors"
        arch = json.loads(json.dumps(container.descriptor["arch"]))
    hidden, kv = arch["hidden"], arch["kv_heads"] * arch["head_dim"]
    layer = 2 * hidden * hidden + 2 * kv * hidden + 4 * hidden + 3 * 4 * arch["ffn"] * hidden + 2 * hidden
    assert description.sections["architecture"]["parameters"] == str(3 * layer + 2 * 512 * hidden + hidden)


@pytest.mark.parametrize(("tied", "kinds"), [(False, {"embedding, int8", "head, bf16"}), (True, {"embedding and head, bf16"})])
def test_a_head_of_its_own_format_is_verified_and_shown(tmp_path: Path, tied: bool, kinds: set[str]) -> None:
    path = tmp_path / "m.colibri"
    make_model(path, replace(SHAPES["tiny"], tied=tied), quant="int4", head="bf16")
    weights = describe(path).sections["weights"]
    assert {kind for kind in weights if kind.startswith(("embedding", "head"))} == kinds
    assert weights["asked for"] == "int4"
    assert str(verify(path)).startswith("whole: ")


def test_description_prints_every_section(path: Path) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(describe(path))
    text = console.export_text()
    for word in ("architecture", "router", "weights", "embedded", "generation", "provenance", "random weights, seed 1", "softmax_chosen"):
        assert word in text
