"""Random models: every shape the engine runs, sane numbers, a tokenizer for every token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import engine_c
from ops.container import Container
from ops.logits import compute_logits
from ops.random_model import SHAPES, ModelShape, make_model, random_tokenizer

TINY = SHAPES["tiny"]
VARIANTS = {
    "tiny": TINY,
    "odd": ModelShape(layers=2, hidden=100, heads=6, kv_heads=2, ffn=50, experts=5, top_k=3, vocab=301, head_dim=24),
    "dense": replace(TINY, experts=1, top_k=1),
    "top1": replace(TINY, top_k=1),
    "every expert": replace(TINY, top_k=4),
    "window": replace(TINY, sliding_window=5),
    "tied": replace(TINY, tied=True),
    "norms and biases": replace(TINY, qk_norm=True, qkv_bias=True, router_bias=True),
    "unrenormalised": replace(TINY, router={"weight": "unbiased_score"}),
    "interleaved": replace(TINY, rope_style="interleaved", rope_dims=16),
    "small vocabulary": replace(TINY, vocab=33),
    "many experts": replace(TINY, experts=40, top_k=8),
}


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("quant", ["f32", "int8"])
def test_engine_runs_it_with_sane_numbers(tmp_path: Path, name: str, quant: str) -> None:
    shape, path = VARIANTS[name], tmp_path / "m.colibri"
    assert make_model(path, shape, quant=quant, seed=3) == path.stat().st_size
    with engine_c.Model.open(path) as model:
        info = model.info
    assert (info.experts, info.top_k, info.vocab, info.head_dim) == (shape.experts, shape.top_k, shape.vocab, shape.head_size)
    assert (info.tied_head, info.sliding_window) == (int(shape.tied), shape.sliding_window)
    result = compute_logits(path, tokens=[(7 * index) % shape.vocab for index in range(64)], greedy=8)
    assert np.isfinite(result.logits).all()
    assert 0.3 < result.logits.std() < 5
    assert len(np.unique(result.logits.argmax(axis=1))) > 5, "the answer depends on the input"
    if shape.experts > 1:
        for experts in result.experts:
            assert len(np.unique(experts)) > shape.experts // 2, "tokens spread over the experts"


@pytest.mark.parametrize("tied", [False, True])
def test_head_has_a_format_of_its_own(tmp_path: Path, tied: bool) -> None:
    path, shape = tmp_path / "m.colibri", replace(TINY, tied=tied)
    assert make_model(path, shape, quant="int4", head="bf16") == path.stat().st_size
    with Container.open(path) as container:
        formats = {name: container.tensors[name].format for name in ("embed", "head", "layers.0.qkv") if name in container.tensors}
        assert formats == {"embed": "bf16" if tied else "int8", "layers.0.qkv": "int4"} | ({} if tied else {"head": "bf16"})
        assert container.descriptor["quant"] == "int4"
    assert np.isfinite(compute_logits(path, tokens=[1, 2, 3]).logits).all()


def test_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model(tmp_path / name, TINY, quant="int4", seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_experts_and_rows_differ(tmp_path: Path) -> None:
    make_model(tmp_path / "m", replace(TINY, vocab=50_000), quant="bf16")
    with Container.open(tmp_path / "m") as container:
        embed = container.dequantise("embed")[0]  # longer than the pool of random numbers
        experts = [container.dequantise(f"layers.{layer}.experts.{expert}")[0] for layer in range(3) for expert in range(4)]
    assert len(np.unique(embed, axis=0)) == len(embed)
    similar = np.corrcoef([expert.ravel() for expert in experts])
    assert np.abs(similar - np.eye(len(experts))).max() < 0.1


@pytest.mark.parametrize("vocab", [259, 260, 512, 32000])
def test_tokenizer_has_a_text_for_every_token(vocab: int) -> None:
    tokenizer = Tokenizer.from_str(random_tokenizer(vocab))
    assert tokenizer.get_vocab_size() == vocab
    assert len({tokenizer.id_to_token(index) for index in range(vocab)}) == vocab
    text = "Grüße, 世界! \x00\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids[::2] == [1, 2]


def test_impossible_shapes_are_named(tmp_path: Path) -> None:
    for shape in (replace(TINY, top_k=5), replace(TINY, kv_heads=3)):
        with pytest.raises(ValueError, match="kv_heads"):
            make_model(tmp_path / "m", shape)
    with pytest.raises(ValueError, match="259"):
        random_tokenizer(258)
    assert list(tmp_path.iterdir()) == []
