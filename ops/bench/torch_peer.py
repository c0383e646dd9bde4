"""torch's side of a comparison: a program for an interpreter that has torch (and for models, transformers). It needs nothing of this
project and is given to that interpreter as a file:

    PYTHON torch_peer.py '{"threads": 2, "shape": {...} or null, "seed": 1}'

It prints one line of JSON once it is ready, then answers each line of JSON on stdin with one on stdout:
{"do": "run", "streams", "context", "answer", "seed"} -> {"rate", "distinct"}     streams 0: reads a prompt of `context` tokens
{"do": "router", "tokens", "experts", "top_k", "hidden", "samples", "least_ns"} -> {"ns": [...]}     one thread; hidden 0: logits are given
An {"error"} instead of an answer ends it.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

Facts = dict[str, Any]  # JSON; and torch's own types are not known here

class Model:
    """A mixture-of-experts model of random bfloat16 weights, its experts run by grouped matrix products."""

    def __init__(self, shape: Facts, seed: int) -> None:
        import torch
        import transformers

        torch.manual_seed(seed)
        self.torch, self.vocab, self.new_cache = torch, shape["vocab"], transformers.DynamicCache
        common = {
            "vocab_size": shape["vocab"],
            "hidden_size": shape["hidden"],
            "num_hidden_layers": shape["layers"],
            "num_attention_heads": shape["heads"],
            "num_key_value_heads": shape["kv_heads"],
            "num_experts_per_tok": shape["top_k"],
            "max_position_embeddings": shape["max_context"],
            "head_dim": shape["head_dim"],
            "rms_norm_eps": shape["norm_eps"],
            "tie_word_embeddings": False,
            "experts_implementation": "grouped_mm",
            "dtype": torch.bfloat16,
        }
        if shape["qk_norm"]:
            config = transformers.Qwen3MoeConfig(
                **common, num_experts=shape["experts"], moe_intermediate_size=shape["ffn"], norm_topk_prob=True
            )
        else:
            config = transformers.MixtralConfig(**common, num_local_experts=shape["experts"], intermediate_size=shape["ffn"])
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        found = getattr(self.model.config, "_experts_implementation", None)
        if found != "grouped_mm":
            raise RuntimeError(f"transformers {transformers.__version__} runs experts as {found!r}, not grouped_mm")
        taken = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in taken else "past_key_values"  # renamed in transformers 5

    def run(self, *, streams: int, context: int, answer: int, seed: int) -> Facts:
        """Tokens a second; a run before it warms up."""
        with self.torch.inference_mode():
            self.once(streams, context, min(answer, 4), seed + 1_000_000)
            return self.once(streams, context, answer, seed)

    def once(self, streams: int, context: int, answer: int, seed: int) -> Facts:
        """One timed run."""
        generator = self.torch.Generator().manual_seed(seed)
        tokens = self.torch.randint(self.vocab, (max(streams, 1), context), generator=generator)
        cache = self.new_cache(config=self.model.config)
        begin = time.perf_counter()
        token = self.step(tokens, cache)
        if not streams:
            return {"rate": context / (time.perf_counter() - begin), "distinct": 1.0}
        distinct, begin = 0.0, time.perf_counter()
        for _ in range(answer):
            token = self.step(token, cache)
            distinct += len(set(token.flatten().tolist())) / streams
        return {"rate": streams * answer / (time.perf_counter() - begin), "distinct": distinct / answer}

    def step(self, tokens: Any, cache: Any) -> Any:
        """The next token of every stream."""
        out = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{self.cache_name: cache})
        return out.logits[:, -1:].argmax(-1)


def router(wish: Facts) -> Facts:
    """Nanoseconds of torch.topk and softmax over the chosen, samples of least_ns or more each."""
    import torch

    tokens, experts, hidden = wish["tokens"], wish["experts"], wish["hidden"]
    logits, gate, x = torch.randn(tokens, experts), torch.randn(experts, hidden or 1), torch.randn(tokens, hidden or 1)

    def run(calls: int) -> int:
        begin = time.perf_counter_ns()
        for _ in range(calls):
            values, _ = torch.topk(x @ gate.T if hidden else logits, wish["top_k"], dim=-1)
            torch.softmax(values, dim=-1)
        return time.perf_counter_ns() - begin

    threads, calls = torch.get_num_threads(), 64
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            while run(calls) < wish["least_ns"]:
                calls *= 2
            return {"ns": [run(calls) / calls for _ in range(wish["samples"])]}
    finally:
        torch.set_num_threads(threads)


def main(wish: Facts) -> Iterator[Facts]:
    """The answers, in order."""
    import torch

    torch.set_num_threads(wish["threads"])
    model = Model(wish["shape"], wish["seed"]) if wish["shape"] else None
    yield {"torch": torch.__version__}
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.pop("do") == "router":
            yield router(asked)
        elif model is None:
            raise ValueError("no shape was given, so there is no model to run")
        else:
            yield model.run(**asked)


if __name__ == "__main__":
    try:
        for answer in main(json.loads(sys.argv[1])):
            print(json.dumps(answer), flush=True)
    except Exception as failure:
        print(json.dumps({"error": f"{type(failure).__name__}: {failure}"}), flush=True)
        sys.exit(1)
