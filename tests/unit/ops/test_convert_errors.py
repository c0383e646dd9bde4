"""Everything missing, wrong or unsupported in a Hugging Face folder is named, and leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.convert import ConvertError, convert
from ops.convert.families import TABLES
from ops.random_model import random_tokenizer
from tests.unit.ops.checkpoints import DROP, Small, write_folder, write_shards
from tests.unit.ops.failures import refused

MIXTRAL = Small()


@pytest.mark.parametrize("name", sorted(MIXTRAL.weights()))
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    weights = MIXTRAL.weights()
    del weights[name]
    says = refused(write_folder(tmp_path / "src", MIXTRAL, weights=weights), tmp_path / "out.colibri")
    assert name in says
    assert "missing" in says


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "max_position_embeddings", "rms_norm_eps", "rope_theta", "num_local_experts", "num_experts_per_tok", "model_type", "hidden_act",
    ],
)  # fmt: skip
def test_missing_setting_is_named(tmp_path: Path, key: str) -> None:
    """Nothing is taken from a class's defaults."""
    says = refused(write_folder(tmp_path / "src", replace(MIXTRAL, changes={key: DROP})), tmp_path / "out.colibri")
    assert key in says


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_theta": DROP, "rope_parameters": {"full": {"rope_theta": 1e4}}}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"hidden_size": 0}, "hidden is 0"),
        ({"hidden_size": 96.5}, "hidden is 96.5"),
        ({"hidden_size": 1 << 40}, "hidden is"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": [96]}, "hidden_size is [96]"),
        ({"num_experts_per_tok": 6}, "6 of 5 experts"),
        ({"num_key_value_heads": 4}, "contradict"),
        ({"head_dim": None, "num_attention_heads": 7, "num_key_value_heads": 7}, "no multiple of"),
        ({"model_type": "qwen2_moe"}, "shared expert"),
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"eos_token_id": 70}, "eos_token_id is 70"),
        ({"vocab_size": 71}, "model.embed_tokens.weight has shape [70, 96], the settings want [71, 96]"),
        ({"num_local_experts": 4}, "block_sparse_moe.gate.weight has shape [5, 96], the settings want [4, 96]"),
        ({"num_local_experts": 6}, "block_sparse_moe.gate.weight has shape [5, 96]"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
    ],
)
def test_unsupported_setting_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refused(write_folder(tmp_path / "src", replace(MIXTRAL, changes=changes)), tmp_path / "out.colibri")


def test_size_beyond_the_engine_is_refused(tmp_path: Path) -> None:
    small = replace(MIXTRAL, head_dim=1026, heads=1, kv_heads=1)
    says = refused(write_folder(tmp_path / "src", small), tmp_path / "out.colibri")
    assert "the engine does not accept the model" in says
    assert "arch.head_dim" in says


def test_tensor_nobody_reads_is_refused(tmp_path: Path) -> None:
    weights = MIXTRAL.weights() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(96, np.float32)}
    says = refused(write_folder(tmp_path / "src", MIXTRAL, weights=weights), tmp_path / "out.colibri")
    assert "model.layers.0.self_attn.q_proj.bias: nothing in" in says


def test_transposed_tensor_is_refused(tmp_path: Path) -> None:
    weights = MIXTRAL.weights()
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    weights[name] = np.ascontiguousarray(weights[name].T)
    assert f"tensor {name} has shape [112, 96]" in refused(
        write_folder(tmp_path / "src", MIXTRAL, weights=weights), tmp_path / "out.colibri"
    )


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.block_sparse_moe.experts.2.w3.weight"]
)
@pytest.mark.parametrize("quant", ["f32", "int4"])
def test_non_finite_weight_is_named(tmp_path: Path, name: str, quant: str) -> None:
    weights = MIXTRAL.weights()
    weights[name].flat[5] = np.nan
    says = refused(write_folder(tmp_path / "src", MIXTRAL, weights=weights), tmp_path / "out.colibri", quant=quant)
    assert name in says
    assert "model.safetensors" in says


def test_type_that_is_no_weight_is_named(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", MIXTRAL)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"model.norm.weight": {"dtype": "F32"', b'"model.norm.weight": {"dtype": "I32"'))
    assert "tensor model.norm.weight is of type I32" in refused(source, tmp_path / "out.colibri")


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    weights = MIXTRAL.weights()
    twice = {"model.norm.weight": weights["model.norm.weight"]}
    source = write_shards(tmp_path / "src", MIXTRAL, [weights, twice])
    says = refused(source, tmp_path / "out.colibri")
    assert "model-00002-of-00002.safetensors: tensor model.norm.weight is also in" in says


def change_index(source: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda index: index["weight_map"].update(more="model-00001-of-00001.safetensors"), "says tensor more is in"),
        (lambda index: index["weight_map"].update(more="../other.safetensors"), "'../other.safetensors', which is not in its folder"),
        (lambda index: index["weight_map"].update(more="gone.safetensors"), "gone.safetensors: cannot be read: No such file"),
        (lambda index: index.pop("weight_map"), "has no weight_map"),
    ],
)
def test_wrong_index_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    source = write_shards(tmp_path / "src", MIXTRAL, [MIXTRAL.weights()])
    change_index(source, change)
    assert says in refused(source, tmp_path / "out.colibri")


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", MIXTRAL)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    says = refused(source, tmp_path / "out.colibri")
    assert f"{path}: tensor " in says
    assert "truncated" in says


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("config.json", None, "config.json: is missing"),
        ("config.json", b"{", "config.json: cannot be read as JSON"),
        ("config.json", b"[]", "config.json: is no JSON object"),
        ("model.safetensors", None, "has neither model.safetensors nor model.safetensors.index.json"),
        ("tokenizer.json", b"{}", "is no tokenizer.json"),
        ("tokenizer.model", b"", "tokenizer.json: is missing; fetch it, name another"),
        ("tokenizer.json", random_tokenizer(300).encode(), "has a token 299, the model has 70"),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, name: str, data: bytes | None, says: str) -> None:
    source = write_folder(tmp_path / "src", MIXTRAL)
    if data is None:
        (source / name).unlink()
    else:
        (source / name).write_bytes(data)
    assert says in refused(source, tmp_path / "out.colibri")


def test_tokenizer_can_be_left_out_or_replaced(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", replace(MIXTRAL, vocab=300))
    (source / "tokenizer.json").write_bytes(b"broken")
    (tmp_path / "good.json").write_text(random_tokenizer(300))
    assert not convert(source, tmp_path / "a", tokenizer="none").tokenizer
    assert convert(source, tmp_path / "b", tokenizer=str(tmp_path / "good.json")).tokenizer
    assert "none.json: cannot be read" in refused(source, tmp_path / "c", tokenizer=str(tmp_path / "none.json"))


def test_disk_that_is_too_small_is_refused_with_what_is_needed(tmp_path: Path, small_disk: Path) -> None:
    says = refused(write_folder(tmp_path / "src", MIXTRAL), small_disk / "out.colibri", quant="f32")
    assert "out.colibri: needs 2 MB" in says
    assert "1 MB free; free space or write elsewhere" in says


def test_disk_that_fills_up_meanwhile_is_refused(tmp_path: Path, small_disk: Path) -> None:
    source = write_folder(tmp_path / "src", MIXTRAL)

    def somebody_else_writes(done: int, total: int, name: str) -> None:
        (small_disk / "else").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))

    with pytest.raises(ConvertError, match=r"the disk is full .* are needed in all"):
        convert(source, small_disk / "out.colibri", quant="int8", progress=somebody_else_writes)
    assert [path.name for path in small_disk.iterdir()] == ["else"]


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", MIXTRAL)
    out = tmp_path / "out.colibri"
    assert "'int5' is unknown" in refused(source, out, quant="int5")
    assert "does not exist" in refused(tmp_path / "none", out)
    assert "'four' is unknown" in refused(source, out, upcycle="four")
    assert "has 5 experts already" in refused(source, out, upcycle="pairs=4")
    (tmp_path / "x.bin").write_bytes(b"")
    assert "neither a folder with config.json, nor" in refused(tmp_path / "x.bin", out)
    assert "is the source itself" in refused(source / "model.safetensors", source / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.pop("scalars"), "scalars is missing"),
        (lambda table: table["scalars"].pop("ffn"), "scalars.ffn must say"),
        (lambda table: table["tensors"].pop("o"), "tensors.o is missing"),
        (lambda table: table["tensors"].update(extra="x"), "tensors.extra is no role"),
        (lambda table: table["tensors"].update(q={"nam": "x"}), "tensors.q is neither"),
        (lambda table: table["tensors"].update(q={"name": "x", "half": "third"}), "half is first or second"),
        (lambda table: table["tensors"].pop("router"), "needs a router tensor"),
        (lambda table: table["router"].update(score="tanh"), "no such router: router.score is 'tanh'; the engine runs: softmax_all"),
        (lambda table: table["router"].update(sel_bias=True), "router.sel_bias is no part of a router; those are score, weight, n_group"),
        (lambda table: table["router"].update(n_group=2, topk_group=1), "router.n_group is 2, which does not divide the 5 experts"),
        (lambda table: table["router"].update(scale={"value": 2}), "router.scale is neither a value nor an object"),
        (lambda table: table["router"].update(scale={"keys": ["routed_scaling_factor"]}), "the setting routed_scaling_factor is missing"),
        (lambda table: table["router"].update(scale={"keys": ["hidden_act"]}), "hidden_act is 'silu', wanted a number"),
        (lambda table: table["router"].update(score={"key": "scoring_func", "sigmoid": "sigmoid"}), "the setting scoring_func is missing"),
        (lambda table: table["router"].update(score={"key": "hidden_act", "gelu": "sigmoid"}), "hidden_act is 'silu', which the engine"),
        (lambda table: table["router"].update(input="residual"), "router.input is residual if and only if tensors.router_input_scale"),
        (lambda table: table["tensors"].update(router_bias={"name": "x", "times": "2"}), "times is rsqrt_hidden, not '2'"),
        (lambda table: table.update(require=[1]), "a requirement is an object"),
    ],
)
def test_faulty_table_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    table = json.loads((TABLES / "mixtral.json").read_text())
    change(table)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    source = write_folder(tmp_path / "src", MIXTRAL)
    message = refused(source, tmp_path / "out.colibri", descriptor=path)
    assert says in message
    assert "table.json" in message or str(source) in message
