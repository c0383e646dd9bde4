"""A model of random weights as a GGUF file, for engines that read that: the shape of ours, with a tokenizer so that a server can speak."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.random_model import ModelShape

_POOL = 4_194_301  # as in ops.random_model: prime, so that rows do not repeat
_SPECIAL = ("<unk>", "<s>", "</s>")
_UNKNOWN, _NORMAL, _CONTROL, _BYTE = 2, 1, 3, 6  # token types of the format
FIRST_WORD = len(_SPECIAL) + 256
"""The first token that is a word of its own; those before it are special or single bytes."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor: its name in the file, its shape as numpy has it, its type and the size of its numbers; std 0 is a vector of ones."""

    name: str
    shape: tuple[int, ...]
    std: float
    full: bool = False  # f32 instead of f16


def architecture(shape: ModelShape) -> str:
    """The format's name for a family of this shape."""
    return "qwen3moe" if shape.qk_norm else "llama"


def write_gguf(out: Path, shape: ModelShape, *, seed: int = 1) -> None:
    """Writes matrices as f16, norms and routers as f32. The file appears whole or not at all."""
    import gguf

    specs = list(tensors(shape))
    unfinished = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(unfinished, architecture(shape))
    try:
        _describe(writer, shape)
        for spec in specs:
            dtype = np.dtype(np.float32 if spec.full else np.float16)
            writer.add_tensor_info(spec.name, spec.shape, dtype, math.prod(spec.shape) * dtype.itemsize)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        pool = np.random.default_rng(seed).standard_normal(_POOL, dtype=np.float32)
        for index, spec in enumerate(specs):
            writer.write_tensor_data(_values(spec, pool, seed + index))
    except BaseException:
        writer.close()
        unfinished.unlink(missing_ok=True)
        raise
    writer.close()
    os.replace(unfinished, out)


def tensors(shape: ModelShape) -> Iterator[Spec]:
    """All tensors, in the order of the file, with the sizes ops.random_model gives ours."""
    hidden, head, kv = shape.hidden, shape.head_size, shape.kv_heads * shape.head_size
    width, branch, inner = shape.heads * head, 1 / math.sqrt(2 * shape.layers), 1 / math.sqrt(hidden)
    yield Spec("token_embd.weight", (shape.vocab, hidden), 1.0)
    yield Spec("output_norm.weight", (hidden,), 0, full=True)
    yield Spec("output.weight", (shape.vocab, hidden), inner)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield Spec(block + "attn_norm.weight", (hidden,), 0, full=True)
        yield Spec(block + "ffn_norm.weight", (hidden,), 0, full=True)
        yield Spec(block + "attn_q.weight", (width, hidden), inner)
        yield Spec(block + "attn_k.weight", (kv, hidden), inner)
        yield Spec(block + "attn_v.weight", (kv, hidden), inner)
        yield Spec(block + "attn_output.weight", (hidden, width), branch / math.sqrt(width))
        if shape.qk_norm:
            yield Spec(block + "attn_q_norm.weight", (head,), 0, full=True)
            yield Spec(block + "attn_k_norm.weight", (head,), 0, full=True)
        yield Spec(block + "ffn_gate_inp.weight", (shape.experts, hidden), inner, full=True)
        yield Spec(block + "ffn_gate_exps.weight", (shape.experts, shape.ffn, hidden), inner)
        yield Spec(block + "ffn_up_exps.weight", (shape.experts, shape.ffn, hidden), inner)
        yield Spec(block + "ffn_down_exps.weight", (shape.experts, hidden, shape.ffn), 2 * branch / math.sqrt(shape.ffn))


def _values(spec: Spec, pool: NDArray[np.float32], seed: int) -> NDArray[np.generic]:
    dtype = np.float32 if spec.full else np.float16
    if not spec.std:
        return np.ones(spec.shape, dtype)
    place = int(np.random.default_rng(seed).integers(_POOL))
    scaled = (np.roll(pool, -place) * np.float32(spec.std)).astype(dtype)
    return np.resize(scaled, math.prod(spec.shape)).reshape(spec.shape)


def _describe(writer: object, shape: ModelShape) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    if shape.qk_norm:
        writer.add_expert_feed_forward_length(shape.ffn)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _describe_tokens(writer, shape.vocab)


def _describe_tokens(writer: object, vocab: int) -> None:
    """Special tokens, every byte, and words that only exist to tell tokens apart in an answer's text. Bytes beyond ASCII are words too: a
    random model says them, and a server fails where its answer is not UTF-8."""
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(f"▁w{index}" for index in range(vocab - FIRST_WORD))]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 128, *[_NORMAL] * (vocab - len(_SPECIAL) - 128)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
