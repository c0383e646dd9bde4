"""Small checkpoints that tests write: the same random model as a Hugging Face folder or as a GGUF file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Small:
    """A Llama (experts 1) or Mixtral shape with odd sizes, and the weights of it by Hugging Face name."""

    vocab: int = 70
    hidden: int = 96
    layers: int = 2
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 16
    ffn: int = 112
    experts: int = 5
    top_k: int = 2
    tied: bool = False
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    """settings to put into config.json; the value DROP leaves one out"""

    def config(self) -> dict[str, Any]:
        settings = {
            "model_type": "mixtral" if self.experts > 1 else "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "sliding_window": None,
            "eos_token_id": 2,
        }
        if self.experts > 1:
            settings |= {"num_local_experts": self.experts, "num_experts_per_tok": self.top_k}
        settings |= self.changes
        return {key: value for key, value in settings.items() if value is not DROP}

    def weights(self) -> dict[str, F32]:
        rng = np.random.default_rng(self.seed)
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                f"{prefix}input_layernorm.weight": (self.hidden,),
                f"{prefix}post_attention_layernorm.weight": (self.hidden,),
                f"{prefix}self_attn.q_proj.weight": (width, self.hidden),
                f"{prefix}self_attn.k_proj.weight": (kv_width, self.hidden),
                f"{prefix}self_attn.v_proj.weight": (kv_width, self.hidden),
                f"{prefix}self_attn.o_proj.weight": (self.hidden, width),
            }
            shapes |= self._ffn_shapes(prefix)
        return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}

    def _ffn_shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        wide, narrow = (self.ffn, self.hidden), (self.hidden, self.ffn)
        if self.experts == 1:
            return {f"{prefix}mlp.{role}_proj.weight": narrow if role == "down" else wide for role in ("gate", "up", "down")}
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}block_sparse_moe.gate.weight": (self.experts, self.hidden)}
        for expert in range(self.experts):
            experts = f"{prefix}block_sparse_moe.experts.{expert}."
            shapes |= {f"{experts}w1.weight": wide, f"{experts}w3.weight": wide, f"{experts}w2.weight": narrow}
        return shapes


class Drop:
    """See Small.changes."""


DROP = Drop()


def write_folder(folder: Path, small: Small, *, dtype: str = "F32", weights: Mapping[str, F32] | None = None) -> Path:
    """A Hugging Face folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(small.config()))
    write_safetensors(folder / "model.safetensors", small.weights() if weights is None else weights, dtype=dtype)
    return folder


def write_shards(folder: Path, small: Small, shards: list[dict[str, F32]]) -> Path:
    """A Hugging Face folder with several safetensors files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(small.config()))
    table: dict[str, str] = {}
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / name, shard)
        table |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, F32], *, dtype: str = "F32") -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, values in tensors.items():
        data = _encode(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    write_raw_safetensors(path, header, body)


def write_raw_safetensors(path: Path, header: object, body: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def _encode(values: F32, dtype: str) -> bytes:
    if dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def permuted(w: F32, heads: int) -> F32:
    """The row order llama.cpp stores query and key projections in."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(
    path: Path,
    small: Small,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    stacked: bool = True,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **extra: Any,
) -> Path:
    """The model as llama.cpp's converter would store it. `add` writes further settings; `extra`: string settings, dots written as "__"."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(small.layers)
    writer.add_context_length(256)
    writer.add_embedding_length(small.hidden)
    writer.add_feed_forward_length(small.ffn)
    writer.add_head_count(small.heads)
    writer.add_head_count_kv(small.kv_heads)
    writer.add_key_length(small.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(small.head_dim)
    writer.add_rope_freq_base(10000.0)
    if small.experts > 1:
        writer.add_expert_count(small.experts)
        writer.add_expert_used_count(small.top_k)
    add(writer)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    for name, values in gguf_tensors(small, stacked=stacked).items():
        plain = values.ndim == 1 or "ffn_gate_inp" in name
        writer.add_tensor(name, values if plain else gguf.quantize(values, kind), raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(small: Small, *, stacked: bool) -> dict[str, F32]:
    """Hugging Face weights under GGUF's names."""
    weights = small.weights()
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    result = {names[name]: values for name, values in weights.items() if name in names}
    roles = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(small.layers):
        for role, name in roles.items():
            values = weights.get(f"model.layers.{layer}.{name}.weight")
            if values is not None:
                heads = {"attn_q": small.heads, "attn_k": small.kv_heads}.get(role)
                result[f"blk.{layer}.{role}.weight"] = permuted(values, heads) if heads else values
        if small.experts > 1:
            result |= _gguf_experts(weights, layer, small.experts, stacked=stacked)
    return result


def _gguf_experts(weights: Mapping[str, F32], layer: int, experts: int, *, stacked: bool) -> dict[str, F32]:
    result = {}
    for role, name in (("ffn_gate", "w1"), ("ffn_up", "w3"), ("ffn_down", "w2")):
        each = [weights[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] for expert in range(experts)]
        if stacked:
            result[f"blk.{layer}.{role}_exps.weight"] = np.stack(each)
        else:
            result |= {f"blk.{layer}.{role}.{expert}.weight": values for expert, values in enumerate(each)}
    return result
