"""Conversions of Hugging Face folders: the bytes are what was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import engine_c
from ops.cli import run
from ops.container import Container
from ops.convert import ConvertError, convert
from ops.convert.families import TABLES
from ops.random_model import random_tokenizer
from tests.unit.ops.checkpoints import DROP, Small, write_folder, write_shards
from tests.unit.ops.failures import refused
from tests.unit.ops.layout_reference import decode

MIXTRAL = Small()
Weights = Mapping[str, np.ndarray]


def source_values(weights: Weights) -> dict[str, np.ndarray]:
    """What each plain or packed container tensor of MIXTRAL must hold."""
    values = {
        "embed": weights["model.embed_tokens.weight"],
        "head": weights["lm_head.weight"],
        "final_norm": weights["model.norm.weight"],
    }
    for layer in range(MIXTRAL.layers):
        prefix = f"model.layers.{layer}."
        values |= {
            f"layers.{layer}.attn_norm": weights[f"{prefix}input_layernorm.weight"],
            f"layers.{layer}.ffn_norm": weights[f"{prefix}post_attention_layernorm.weight"],
            f"layers.{layer}.qkv": np.concatenate([weights[f"{prefix}self_attn.{role}_proj.weight"] for role in "qkv"]),
            f"layers.{layer}.o": weights[f"{prefix}self_attn.o_proj.weight"],
            f"layers.{layer}.router": weights[f"{prefix}block_sparse_moe.gate.weight"],
        }
    return values


def test_every_weight_arrives_in_its_place(tmp_path: Path) -> None:
    out = tmp_path / "out.colibri"
    report = convert(write_folder(tmp_path / "src", MIXTRAL), out, quant="f32")
    weights = MIXTRAL.weights()
    with Container.open(out) as container:
        for name, expected in source_values(weights).items():
            np.testing.assert_array_equal(container.dequantise(name)[0], expected, err_msg=name)
        for layer in range(MIXTRAL.layers):
            for expert in range(MIXTRAL.experts):
                prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                for ours, role in zip(container.dequantise(f"layers.{layer}.experts.{expert}"), ("w1", "w3", "w2"), strict=True):
                    np.testing.assert_array_equal(ours, weights[f"{prefix}.{role}.weight"])
        assert len(container.tensors) == report.tensors
    assert report.parameters == sum(values.size for values in weights.values() if values.ndim > 1)
    assert report.file_bytes == out.stat().st_size


@pytest.mark.parametrize(
    ("quant", "linear", "head"),
    [("f32", "f32", "f32"), ("bf16", "bf16", "bf16"), ("int8", "int8", "int8"), ("int4", "int4", "int8")],
)
def test_bytes_are_of_the_format_asked_for(tmp_path: Path, quant: str, linear: str, head: str) -> None:
    out = tmp_path / "out.colibri"
    convert(write_folder(tmp_path / "src", MIXTRAL), out, quant=quant)
    weights = MIXTRAL.weights()
    embed, o = weights["model.embed_tokens.weight"], weights["model.layers.0.self_attn.o_proj.weight"]
    bound = {"f32": 0, "bf16": 1 / 256, "int8": 0.005, "int4": 0.15}
    with Container.open(out) as container:
        assert container.descriptor["quant"] == quant
        for name, entry in container.tensors.items():
            assert entry.format == ("f32" if entry.layout == "plain" else head if name in ("embed", "head") else linear)
        # The bytes themselves, read by the decoder that shares no code with the engine, and by their number: nothing else could be in them.
        assert np.abs(decode(head, container.tensor("embed"), *embed.shape) - embed).max() <= bound[head] * np.abs(embed).max()
        assert np.abs(decode(linear, container.tensor("layers.0.o"), *o.shape) - o).max() <= bound[linear] * np.abs(o).max()
        assert len(container.tensor("layers.0.o")) == 9 * {"f32": 4096, "bf16": 2048, "int8": 1088, "int4": 576}[linear]
        np.testing.assert_array_equal(container.dequantise("layers.1.router")[0], weights["model.layers.1.block_sparse_moe.gate.weight"])
    with engine_c.Model.open(out) as model:
        assert (model.info.expert_format, model.info.head_format) == (engine_c.FORMATS[linear], engine_c.FORMATS[head])


@pytest.mark.parametrize(
    ("quant", "head", "tied", "embedding"),
    [("int4", "int4", False, "int8"), ("int4", "int4", True, "int4"), ("int8", "bf16", False, "int8"), ("int8", "bf16", True, "bf16")],
)
def test_head_has_the_format_asked_for_and_so_has_an_embedding_tied_to_it(
    tmp_path: Path, quant: str, head: str, tied: bool, embedding: str
) -> None:
    out = tmp_path / "out.colibri"
    report = convert(write_folder(tmp_path / "src", replace(MIXTRAL, tied=tied)), out, quant=quant, head=head)
    assert (report.quant, report.head) == (quant, head)
    with Container.open(out) as container:
        assert container.descriptor["quant"] == quant
        expected = {"embed": embedding, "head": head}
        for name, entry in container.tensors.items():
            assert entry.format == ("f32" if entry.layout == "plain" else expected.get(name, quant))
        assert ("head" in container.tensors) != tied
    with engine_c.Model.open(out) as model:
        assert (model.info.expert_format, model.info.head_format) == (engine_c.FORMATS[quant], engine_c.FORMATS[head])


def test_the_usual_head_asked_for_gives_the_same_file(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", MIXTRAL)
    convert(source, tmp_path / "a", quant="int4")
    convert(source, tmp_path / "b", quant="int4", head="int8")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_command_says_the_format_of_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_folder(tmp_path / "src", MIXTRAL), tmp_path / "out.colibri"
    assert run(["convert", str(source), str(out), "--quant", "int8", "--head", "int4"]) == 0
    assert "M parameters in int8, head in int4, " in capsys.readouterr().out.splitlines()[-1]
    assert run(["inspect", str(out)]) == 0
    assert "head, int4" in capsys.readouterr().out


def test_unknown_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="the head's format 'int5' is unknown; it is one of f32, bf16, int8, int4"):
        convert(write_folder(tmp_path / "src", MIXTRAL), tmp_path / "out.colibri", head="int5")
    assert not (tmp_path / "out.colibri").exists()


def test_same_source_gives_the_same_file(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", MIXTRAL)
    for name in ("a", "b"):
        convert(source, tmp_path / name, quant="int8")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_sources_keep_their_values(tmp_path: Path, dtype: str) -> None:
    exact = {name: (np.round(values * 8) / 8).astype(np.float32) for name, values in MIXTRAL.weights().items()}
    convert(write_folder(tmp_path / "f32", MIXTRAL, weights=exact), tmp_path / "a", quant="int8")
    convert(write_folder(tmp_path / "half" / "f32", MIXTRAL, weights=exact, dtype=dtype), tmp_path / "b", quant="int8")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_shards_give_the_same_file_as_one(tmp_path: Path) -> None:
    weights = MIXTRAL.weights()
    names = list(weights)
    shards = [{name: weights[name] for name in names[start::3]} for start in range(3)]
    convert(write_folder(tmp_path / "one" / "m", MIXTRAL), tmp_path / "a", quant="int4")
    convert(write_shards(tmp_path / "many" / "m", MIXTRAL, shards), tmp_path / "b", quant="int4")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_large_matrix_is_packed_in_pieces_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_folder(tmp_path / "src", replace(MIXTRAL, vocab=333))
    convert(source, tmp_path / "a", quant="int8")
    monkeypatch.setattr("ops.convert.pipeline._CHUNK_BYTES", 64 * 4 * MIXTRAL.hidden)
    convert(source, tmp_path / "b", quant="int8")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tied_head_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out.colibri"
    convert(write_folder(tmp_path / "src", replace(MIXTRAL, tied=True)), out)
    with engine_c.Model.open(out) as model:
        assert model.info.tied_head == 1


def test_dense_model_is_one_expert_without_router(tmp_path: Path) -> None:
    out = tmp_path / "out.colibri"
    convert(write_folder(tmp_path / "src", Small(experts=1)), out)
    with engine_c.Model.open(out) as model:
        assert (model.info.experts, model.info.top_k, model.info.router_layers) == (1, 1, 0)


@pytest.mark.parametrize(("given", "stored"), [(None, 0), (DROP, 0), (7, 7)])
def test_sliding_window_null_is_none(tmp_path: Path, given: object, stored: int) -> None:
    out = tmp_path / "out.colibri"
    convert(write_folder(tmp_path / "src", replace(MIXTRAL, changes={"sliding_window": given})), out)
    with engine_c.Model.open(out) as model:
        assert model.info.sliding_window == stored


def test_old_and_new_rotary_settings_are_read(tmp_path: Path) -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_theta": DROP, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    frequencies = []
    for name, changes in (("old", old), ("new", new)):
        convert(write_folder(tmp_path / name, replace(MIXTRAL, changes=changes)), tmp_path / f"{name}.colibri")
        with Container.open(tmp_path / f"{name}.colibri") as container:
            frequencies.append(container.dequantise("rope.inv_freq")[0])
    np.testing.assert_array_equal(frequencies[0], frequencies[1])
    np.testing.assert_allclose(frequencies[0], 0.5 * 5e5 ** (-np.arange(0, 16, 2) / 16), rtol=1e-6)


def test_texts_are_embedded(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", replace(MIXTRAL, vocab=300))
    (source / "tokenizer.json").write_text(random_tokenizer(300))
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": "{{ messages }}"}]}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.7, "pad_token_id": -1}))
    (source / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model")
    (source / "LICENSE").write_text("Do as you like.")
    out = tmp_path / "out.colibri"
    assert convert(source, out).tokenizer
    with Container.open(out) as container:
        assert container.blob("tokenizer.json").decode() == random_tokenizer(300)
        assert container.blob("chat_template") == b"{{ messages }}"
        assert json.loads(container.blob("config.json"))["model_type"] == "mixtral"
        assert container.blob("licence") == b"Do as you like."
        assert container.descriptor["provenance"]["licence"] == "apache-2.0"
        generation = container.descriptor["generation"]
    assert generation == {
        "eos_token_ids": [2, 5], "bos_token_id": None, "pad_token_id": None, "add_bos": False, "temperature": 0.7, "top_p": 1.0, "top_k": 0,
    }  # fmt: skip


def test_given_sampling_wins_over_the_sources(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", MIXTRAL)
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 5}))
    convert(source, tmp_path / "out.colibri", sampling={"temperature": 0.2, "top_p": 0.9})
    with Container.open(tmp_path / "out.colibri") as container:
        generation = container.descriptor["generation"]
    assert (generation["temperature"], generation["top_p"], generation["top_k"]) == (0.2, 0.9, 5)


def test_tokenizer_that_prefixes_a_token_sets_add_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "[unk]": 2}, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    source = write_folder(tmp_path / "src", replace(MIXTRAL, changes={"bos_token_id": 0}))
    (source / "tokenizer.json").write_text(tokenizer.to_str())
    convert(source, tmp_path / "out.colibri")
    with Container.open(tmp_path / "out.colibri") as container:
        assert container.descriptor["generation"]["add_bos"] is True


def test_own_table_converts_a_model_of_known_blocks(tmp_path: Path) -> None:
    """Other names, a fused gate/up, biases: no line of code."""
    small = Small(experts=1, changes={"model_type": "odd"})
    weights = small.weights()
    for layer in range(small.layers):
        prefix = f"model.layers.{layer}."
        gate, up = (weights.pop(f"{prefix}mlp.{role}_proj.weight") for role in ("gate", "up"))
        weights[f"{prefix}mlp.gate_up.weight"] = np.concatenate([gate, up])
        for role, rows in (("q", 96), ("k", 48), ("v", 48)):
            weights[f"{prefix}self_attn.{role}_proj.bias"] = np.full(rows, {"q": 1, "k": 2, "v": 3}[role], np.float32)
    source = write_folder(tmp_path / "src", small, weights=weights)
    assert "model family 'odd' is not supported" in refused(source, tmp_path / "out.colibri")
    table = json.loads((TABLES / "llama.json").read_text())
    fused = "model.layers.{layer}.mlp.gate_up.weight"
    table["tensors"] |= {"gate": {"name": fused, "half": "first"}, "up": {"name": fused, "half": "second"}}
    table["tensors"] |= {f"{role}_bias": f"model.layers.{{layer}}.self_attn.{role}_proj.bias" for role in "qkv"}
    (tmp_path / "odd.json").write_text(json.dumps(table))
    convert(source, tmp_path / "out.colibri", quant="f32", descriptor=tmp_path / "odd.json")
    with Container.open(tmp_path / "out.colibri") as container:
        for layer in range(small.layers):
            gate, up, _ = container.dequantise(f"layers.{layer}.experts.0")
            np.testing.assert_array_equal(np.concatenate([gate, up]), weights[f"model.layers.{layer}.mlp.gate_up.weight"])
            bias = container.dequantise(f"layers.{layer}.qkv_bias")[0]
            np.testing.assert_array_equal(bias, np.repeat(np.float32([1, 2, 3]), [96, 48, 48]))
    engine_c.Model.open(tmp_path / "out.colibri").close()


def test_progress_is_monotonic_and_complete(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    out = tmp_path / "out.colibri"
    convert(write_folder(tmp_path / "src", MIXTRAL), out, progress=lambda done, total, name: calls.append((done, total, name)))
    with Container.open(out) as container:
        assert [name for _, _, name in calls] == list(container.tensors)
        assert calls[-1][0] == calls[-1][1] == sum(entry.length for entry in container.tensors.values())
    assert sorted(calls) == calls
