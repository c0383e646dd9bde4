"""Makes the golden checkpoints and their vectors with transformers. Run once, by hand; the results are committed (README.md).

    python -m venv /tmp/golden && /tmp/golden/bin/pip install -r tests/golden/requirements.txt
    /tmp/golden/bin/python -m tests.golden.make_vectors [NAME ...]

Each case becomes models/NAME/{config.json, *.safetensors, vectors.npz}. Weights are random, drawn so that logits spread over several
units; a seed is taken only if no routing choice and no greedy token is a near tie, so that float32 arithmetic in any order must agree.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.golden import reference

FOLDER = Path(__file__).parent / "models"
GREEDY = 24  # tokens of the continuation
ROUTE_GAP = 1e-3  # neighbouring gate logits among the k + 1 largest differ at least so much
TOKEN_GAP = 2e-3  # the two largest logits differ at least so much, of max|logit|


@dataclass(frozen=True)
class Case:
    shape: dict[str, object]  # arguments of the configuration class
    prompt: int  # tokens
    theta: float = 10_000.0
    dtype: torch.dtype = torch.float32
    llama: bool = False
    old_config: bool = False  # rope_theta at the top level, torch_dtype, no head_dim: what transformers 4 wrote
    shard_size: str = "1GB"


def shape(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int, int], experts: tuple[int, int] | None, vocab: int, **more: object
) -> dict[str, object]:
    """heads: query heads, KV heads, head_dim. experts: how many, how many of them a token uses."""
    out: dict[str, object] = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        **more,
    }
    if experts is not None:
        out |= {"num_local_experts": experts[0], "num_experts_per_tok": experts[1]}
    return out


CASES = {
    # Top-2 of 5; one KV head; head_dim not hidden / heads and no multiple of 16; a window the prompt outgrows.
    "window": Case(
        shape(96, 112, 2, (3, 1, 40), (5, 2), 259, sliding_window=24, rms_norm_eps=1e-5), 53, theta=11_117.0, dtype=torch.bfloat16
    ),
    # Top-2 of 6, tied, wider than it is round; no window.
    "tied": Case(
        shape(160, 176, 2, (4, 2, 48), (6, 2), 512, tie_word_embeddings=True, rms_norm_eps=1e-6), 67, theta=1e6, dtype=torch.bfloat16
    ),
    "top1": Case(shape(96, 80, 2, (3, 3, 32), (5, 1), 101), 45, theta=50_021.0, dtype=torch.bfloat16),
    "top3": Case(shape(72, 56, 3, (6, 3, 20), (6, 3), 131, sliding_window=17), 59, dtype=torch.bfloat16),
    "all-experts": Case(shape(40, 56, 4, (4, 2, 12), (4, 4), 97, sliding_window=7, rms_norm_eps=1e-3), 41, theta=777.0),
    "dense-llama": Case(shape(96, 176, 2, (4, 2, 24), None, 259, rms_norm_eps=1e-6), 61, theta=100_000.0, dtype=torch.bfloat16, llama=True),
    "old-config": Case(shape(64, 48, 2, (4, 1, 16), (5, 2), 259, rms_norm_eps=1e-6), 43, theta=123_457.0, old_config=True),
    "sharded": Case(
        shape(64, 80, 2, (4, 2, 24), (5, 2), 131, sliding_window=32), 50, theta=31_337.0, dtype=torch.bfloat16, shard_size="64KB"
    ),
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Gains that keep activations near one, spread gate logits and give logits a standard deviation of a few units."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            value = 1 + 0.25 * noise
        elif "embed_tokens" in name:
            value = noise * (3 / parameter.shape[1] ** 0.5 if model.config.tie_word_embeddings else 1.0)
        else:
            gain = {"gate.weight": 2.0, "lm_head.weight": 3.0}.get(".".join(name.split(".")[-2:]), 1.3)
            value = gain * noise / parameter.shape[-1] ** 0.5
        parameter.data = value.to(parameter.dtype)


def build(case: Case, seed: int) -> torch.nn.Module:
    config_class, model_class = (LlamaConfig, LlamaForCausalLM) if case.llama else (MixtralConfig, MixtralForCausalLM)
    config = config_class(**case.shape, rope_parameters={"rope_type": "default", "rope_theta": case.theta}, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = "eager"
    model = model_class(config).to(case.dtype).eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def run(model: torch.nn.Module, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [T, vocab], experts [L, T, k] and weights of one float32 forward pass without a cache."""
    experts, weights = [], []

    def keep(_module: object, _inputs: object, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        weights.append(output[1].numpy())
        experts.append(output[2].numpy())

    hooks = [m.register_forward_hook(keep) for n, m in model.named_modules() if n.endswith("mlp.gate")]
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    shape = (len(experts), len(tokens), experts[0].shape[1] if experts else 1)
    return logits, np.asarray(experts, np.int32).reshape(shape), np.asarray(weights, np.float32).reshape(shape)


def greedy(model: torch.nn.Module, tokens: list[int]) -> list[int]:
    out: list[int] = []
    while len(out) < GREEDY:
        out.append(int(run(model, tokens + out)[0][-1].argmax()))
    return out


def save(model: torch.nn.Module, case: Case, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder, max_shard_size=case.shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if case.old_config:
        config = json.loads((folder / "config.json").read_text())
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["torch_dtype"] = config.pop("dtype")
        config["rope_scaling"] = None
        config["transformers_version"] = "4.36.0"
        del config["head_dim"]
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def attempt(case: Case, seed: int, folder: Path) -> dict[str, object] | None:
    """The folder and vectors of one seed, or None if a choice is a near tie."""
    save(build(case, seed), case, folder)
    # Vectors come from the weights as a reader of the folder gets them, computed in float32.
    model_class = LlamaForCausalLM if case.llama else MixtralForCausalLM
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    judge = reference.from_checkpoint(folder)
    tokens = np.random.default_rng(seed).integers(3, model.config.vocab_size, case.prompt).tolist()
    if reference.forward(judge, tokens).gap < ROUTE_GAP:
        return None
    continuation = greedy(model, tokens)
    exact = reference.forward(judge, tokens + continuation)
    top2 = np.sort(exact.logits[len(tokens) - 1 :])[:, -2:]
    if exact.gap < ROUTE_GAP or (top2[:, 1] - top2[:, 0]).min() < TOKEN_GAP * np.abs(exact.logits).max():
        return None
    logits, experts, weights = run(model, tokens)
    return {
        "tokens": np.asarray(tokens, np.int32),
        "logits": logits.astype(np.float32),
        "experts": experts,
        "weights": weights,
        "greedy": np.asarray(continuation, np.int32),
        "f64_gap": np.abs(logits - exact.logits[: len(tokens)]).max() / np.abs(logits).max(),
    }


def make(name: str, case: Case) -> None:
    folder = FOLDER / name
    for seed in range(1000):
        vectors = attempt(case, seed, folder)
        if vectors is not None:
            np.savez_compressed(folder / "vectors.npz", **vectors)
            size = sum(file.stat().st_size for file in folder.iterdir())
            spread = np.std(vectors["logits"])
            print(f"{name}: seed {seed}, logits std {spread:.2f}, float64 gap {vectors['f64_gap']:.1e}, {size / 1e6:.2f} MB", flush=True)
            return
    raise SystemExit(f"{name}: no seed below 1000 avoids near ties")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], help="cases to make (all)")
    for name in parser.parse_args().names or CASES:
        make(name, CASES[name])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
