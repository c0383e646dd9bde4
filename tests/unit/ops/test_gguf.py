"""GGUF as a source: the same model as from Hugging Face, every quantised type, damage, tokenizers."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from ops.container import Container
from ops.convert import ConvertError, convert
from ops.convert.gguf_file import GGUFFile
from ops.convert.gguf_tokenizer import rebuild_tokenizer
from tests.unit.ops.checkpoints import Small, gguf_tensors, write_folder, write_gguf
from tests.unit.ops.failures import refused


def tensors(path: Path) -> dict[str, bytes]:
    with Container.open(path) as container:
        return {name: container.tensor(name) for name in container.tensors}


@pytest.mark.parametrize(
    ("small", "stacked"),
    [
        (Small(), True),
        (Small(), False),
        (Small(experts=1), True),
        (Small(experts=1, tied=True), True),
        (Small(experts=3, heads=4, kv_heads=1, head_dim=32), True),
    ],
)
def test_gguf_gives_the_tensors_of_the_hugging_face_folder(tmp_path: Path, small: Small, stacked: bool) -> None:
    convert(write_folder(tmp_path / "src", small), tmp_path / "hf.colibri", quant="f32")
    convert(write_gguf(tmp_path / "m.gguf", small, stacked=stacked), tmp_path / "gguf.colibri", quant="f32")
    assert tensors(tmp_path / "gguf.colibri") == tensors(tmp_path / "hf.colibri")
    with Container.open(tmp_path / "hf.colibri") as ours, Container.open(tmp_path / "gguf.colibri") as theirs:
        assert ours.descriptor["arch"] == theirs.descriptor["arch"]
        assert ours.descriptor["router"] == theirs.descriptor["router"]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_quantised_weights_become_what_the_gguf_library_reads(tmp_path: Path, kind: Kind) -> None:
    small = Small(hidden=96, ffn=128, experts=2)
    convert(write_gguf(tmp_path / "m.gguf", small, kind=kind), tmp_path / "out.colibri", quant="f32")
    stored = gguf_tensors(small, stacked=True)
    with Container.open(tmp_path / "out.colibri") as container:
        for name, source in (("embed", "token_embd"), ("layers.1.o", "blk.1.attn_output")):
            expected = gguf.dequantize(gguf.quantize(stored[f"{source}.weight"], kind), kind)
            np.testing.assert_array_equal(container.dequantise(name)[0], expected)
        gate = gguf.dequantize(gguf.quantize(stored["blk.1.ffn_gate_exps.weight"], kind), kind)
        np.testing.assert_array_equal(container.dequantise("layers.1.experts.1")[0], gate[1])


def dequantisable() -> list[Kind]:
    """The types gguf.dequantize does, found by asking it."""
    found = []
    for kind in Kind:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        with contextlib.suppress(NotImplementedError):
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            found.append(kind)
    return found


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("kind", dequantisable())
def test_rows_of_every_type_are_dequantised(tmp_path: Path, kind: Kind) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = -(-64 // block) * block
    row_bytes = columns // block * block_bytes
    data = np.random.default_rng(int(kind)).integers(0, 256, (3, 5, row_bytes), np.uint8)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.ones(3, np.float32))
    writer.add_tensor("w", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.dequantize(data.reshape(15, row_bytes), kind).reshape(3, 5, columns)
    with contextlib.closing(GGUFFile(path)) as file:
        assert file.tensors["w"].shape == (3, 5, columns)
        np.testing.assert_array_equal(file.rows("w", 0, 3), expected)
        np.testing.assert_array_equal(file.rows("w", 1, 2), expected[1:2])


def test_types_that_cannot_be_dequantised_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", Small(experts=1))
    data = bytearray(path.read_bytes())
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    struct.pack_into("<I", data, at, int(Kind.I32))
    path.write_bytes(data)
    assert "tensor output_norm.weight is of type I32" in refused(path, tmp_path / "out.colibri")
    struct.pack_into("<I", data, at, 9999)
    path.write_bytes(data)
    assert "tensor output_norm.weight is of type 9999" in refused(path, tmp_path / "out.colibri")


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "'yarn (GGUF)' is not supported"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "martian"}, "tokenizer.ggml.pre is 'martian'"),
        ({"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "smollm"}, "tokenizer.ggml.tokens is missing"),
    ],
)
def test_unsupported_settings_are_named(tmp_path: Path, extra: dict[str, Any], says: str) -> None:
    assert says in refused(write_gguf(tmp_path / "m.gguf", Small(experts=1), **extra), tmp_path / "out.colibri")


def test_unknown_tokenizer_can_be_left_out(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", Small(experts=1), tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="martian")
    assert "--tokenizer none" in refused(source, tmp_path / "out.colibri")
    assert not convert(source, tmp_path / "out.colibri", tokenizer="none").tokenizer


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("w", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'gguf:mamba' is not supported" in refused(tmp_path / "m.gguf", tmp_path / "out.colibri")


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def raw_gguf(*, keys: bytes = b"", key_count: int = 0, rows: bytes = b"", row_count: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, row_count, key_count) + keys + rows
    return head + bytes(-len(head) % 32) + body


def row(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the magic at offset 0 takes 4 bytes, the file has 0"),
        (b"GGML" + bytes(60), "no magic"),
        (raw_gguf(version=1), "GGUF version 1"),
        (raw_gguf(version=3 << 24), "GGUF version"),
        (raw_gguf(key_count=1 << 63), "truncated"),
        (raw_gguf(row_count=1 << 63), "truncated"),
        (raw_gguf(key_count=1, keys=string("k") + struct.pack("<IIQ", 9, 5, 1 << 60)), "k at offset"),
        (raw_gguf(key_count=1, keys=string("k") + struct.pack("<IIQ", 9, 8, 1 << 60)), "k says it has"),
        (raw_gguf(key_count=1, keys=string("k") + struct.pack("<IIQ", 9, 9, 1)), "value of type 9"),
        (raw_gguf(key_count=1, keys=string("k") + struct.pack("<I", 77)), "value of type 77"),
        (raw_gguf(key_count=1, keys=struct.pack("<Q", (1 << 64) - 1)), "a key at offset"),
        (raw_gguf(key_count=2, keys=2 * (string("k") + struct.pack("<II", 4, 1))), "k is there twice"),
        (raw_gguf(row_count=2, rows=2 * row("w", (2,)), body=bytes(64)), "tensor w is there twice"),
        (raw_gguf(row_count=1, rows=row("w", (4, 4)), body=bytes(63)), "tensor w of shape [4, 4] at offset"),
        (raw_gguf(row_count=1, rows=row("w", (1 << 62, 1 << 62)), body=bytes(64)), "tensor w of shape"),
        (raw_gguf(row_count=1, rows=row("w", (0, 4)), body=bytes(64)), "tensor w of shape"),
        (raw_gguf(row_count=1, rows=row("w", (4,), offset=1 << 63), body=bytes(64)), "tensor w of shape"),
        (raw_gguf(row_count=1, rows=row("w", (4,) * 5), body=bytes(64)), "tensor w has 5 dimensions"),
        (raw_gguf(row_count=1, rows=row("w", (33,), kind=8), body=bytes(64)), "tensor w has rows of 33"),
        (raw_gguf(key_count=1, keys=string("general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0"),
        (raw_gguf(), "general.architecture is missing"),
        (
            raw_gguf(
                key_count=2,
                keys=string("general.architecture")
                + struct.pack("<I", 8)
                + string("llama")
                + string("split.count")
                + struct.pack("<IH", 2, 4),
            ),
            "one of 4 pieces; merge them",
        ),
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    message = refused(path, tmp_path / "out.colibri")
    assert says in message
    assert str(path) in message


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", Small(experts=1, layers=1)).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 7), len(whole) // 2, len(whole) - 32]:
        path.write_bytes(whole[:length])
        refused(path, tmp_path / "out.colibri")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = raw_gguf(
        key_count=2,
        keys=string("a") + struct.pack("<I", 8) + string("text") + string("b") + struct.pack("<IIQ4f", 9, 6, 4, 1, 2, 3, 4),
        row_count=2,
        rows=row("w", (32, 2), kind=8) + row("v", (4,), offset=96),
        body=bytes(112),
    )
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(raw)
    with contextlib.suppress(ConvertError), contextlib.closing(GGUFFile(path)) as file:
        for name, stored in file.tensors.items():
            assert file.rows(name, 0, 1).shape == (1, *stored.shape[1:])


# ---------------------------------------------------------------- tokenizer


def vocabulary(*merges: str) -> dict[str, Any]:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<|im_start|>", "<|im_end|>", *symbols, *(merge.replace(" ", "") for merge in merges), "extra"]
    kinds = [3, 3, 3, *[1] * (len(tokens) - 4), 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
    }


def rebuilt(pre: str, metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(rebuild_tokenizer(Path("m.gguf"), metadata | {"tokenizer.ggml.pre": pre}))


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_rebuilt_tokenizer_gives_texts_back(pre: str, text: str) -> None:
    tokenizer = rebuilt(pre, vocabulary("a b", "ab c", "Ġ a"))
    ids = tokenizer.encode(text).ids
    expected = text if pre != "qwen2" else str(tokenizer.normalizer.normalize_str(text))
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "it's 123", ["it", "'s", "Ġ", "1", "2", "3"]),
        ("gpt-2", "it's 123", ["it", "'s", "Ġ123"]),
        ("llama-bpe", "it's 1234\n\nx", ["it", "'s", "Ġ", "123", "4", "ĊĊ", "x"]),
        ("qwen2", "it's 12\n\nx", ["it", "'s", "Ġ", "1", "2", "ĊĊ", "x"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = rebuilt(pre, vocabulary())
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_special_tokens_are_whole_and_others_merge(tmp_path: Path) -> None:
    tokenizer = rebuilt("smollm", vocabulary("a b", "ab c"))
    metadata = vocabulary("a b", "ab c")["tokenizer.ggml.tokens"]
    assert tokenizer.encode("<|im_start|>abcextra<|im_end|>").ids == [1, metadata.index("abc"), metadata.index("extra"), 2]
    assert tokenizer.decode([1, metadata.index("abc"), 2]) == "abc"


def test_bytes_without_a_symbol_are_dropped_and_do_not_crash() -> None:
    metadata = vocabulary()
    drop = metadata["tokenizer.ggml.tokens"].index("a")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        del metadata[key][drop]
    tokenizer = rebuilt("smollm", metadata)
    assert tokenizer.decode(tokenizer.encode("banana").ids) == "bnn"


def test_first_token_is_added_when_the_model_wants_it() -> None:
    assert rebuilt("gpt-2", vocabulary() | {"tokenizer.ggml.add_bos_token": True}).encode("a").ids[0] == 1
    assert rebuilt("gpt-2", vocabulary() | {"tokenizer.ggml.add_bos_token": False}).encode("a").ids[0] != 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["tokenizer.ggml.merges"].append("zz yy"), "do not fit together"),
        (lambda m: m["tokenizer.ggml.merges"].append("zz"), "'zz', which is no pair"),
        (lambda m: m["tokenizer.ggml.tokens"].append("a"), "1 tokens twice"),
        (lambda m: m["tokenizer.ggml.tokens"].append(7), "no list of strings"),
    ],
)
def test_faulty_vocabulary_is_named(change: Callable[[dict[str, Any]], object], says: str) -> None:
    metadata = vocabulary()
    change(metadata)
    with pytest.raises(ConvertError, match=r"m\.gguf") as caught:
        rebuilt("gpt-2", metadata)
    assert says in str(caught.value)


def test_settings_of_the_file_are_embedded(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", Small(experts=1), general__license="mit", tokenizer__chat_template="{{ x }}")
    convert(source, tmp_path / "out.colibri")
    with Container.open(tmp_path / "out.colibri") as container:
        assert container.blob("chat_template") == b"{{ x }}"
        assert json.loads(container.blob("config.json"))["llama.block_count"] == 2
        assert container.descriptor["provenance"]["licence"] == "mit"
        assert container.descriptor["arch"]["norm_eps"] == 1e-5
