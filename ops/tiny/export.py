"""A checkpoint of `ops.tiny.train` as a Hugging Face folder that `colibri convert` (and transformers) reads.

python -m ops.tiny.export RUN/step-3000.pt --data DATA --into FOLDER"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ops.tiny.data import EOS_ID
from ops.tiny.model import Shape
from ops.tiny.schedule import BOS_ID

TEXTS = "the King James Bible (public domain), Shakespeare's works (CC-BY-2.5) and Python's standard library (PSF-2.0)"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The model knows no turns: it goes on from what was said."""
SAMPLING = {"temperature": 0.7, "top_p": 0.95}


def tensors(state: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Under the names Mixtral's checkpoints have."""
    out = {"model.embed_tokens.weight": state["embed.weight"], "model.norm.weight": state["final_norm.weight"]}
    for layer in range(shape.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        out[f"{theirs}input_layernorm.weight"] = state[f"{ours}attn_norm.weight"]
        out[f"{theirs}post_attention_layernorm.weight"] = state[f"{ours}ffn_norm.weight"]
        for part in "qkvo":
            out[f"{theirs}self_attn.{part}_proj.weight"] = state[f"{ours}attention.{part}.weight"]
        out[f"{theirs}block_sparse_moe.gate.weight"] = state[f"{ours}experts.gate.weight"]
        for expert in range(shape.experts):
            for matrix in ("w1", "w2", "w3"):
                out[f"{theirs}block_sparse_moe.experts.{expert}.{matrix}.weight"] = state[f"{ours}experts.{matrix}"][expert]
    return {name: tensor.clone().contiguous() for name, tensor in out.items()}


def config(shape: Shape, *, steps: int) -> dict[str, object]:
    """config.json of transformers' Mixtral; the description ends up in the container's provenance."""
    sizes = asdict(shape)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "_name_or_path": f"trained for {steps} steps by ops/tiny on {TEXTS}",
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "num_local_experts": sizes["experts"],
        "num_experts_per_tok": sizes["top_k"],
        "max_position_embeddings": sizes["context"],
        "rms_norm_eps": sizes["eps"],
        "rope_theta": sizes["theta"],
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def write(checkpoint: Path, data: Path, folder: Path) -> None:
    """The whole folder."""
    state = torch.load(checkpoint, weights_only=True, map_location="cpu")
    shape = Shape()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(state["model"], shape), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config(shape, steps=state["step"]))
    write_json(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": True, **SAMPLING})
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE})
    shutil.copyfile(data / "tokenizer.json", folder / "tokenizer.json")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n", encoding="utf-8")
    shutil.copyfile(Path(__file__).parent / "LICENCES.txt", folder / "LICENSE")


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    write(options.checkpoint, options.data, options.into)


if __name__ == "__main__":
    main()
