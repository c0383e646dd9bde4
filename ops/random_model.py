"""Containers of random weights, written directly: shapes to time, and small models for tests. They route evenly and never overflow, and
what they say is nonsense."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_c import version
from ops.container_layout import Json, TensorEntry, file_bytes
from ops.container_writer import ContainerWriter, descriptor_reserve
from ops.convert.pipeline import Progress, write_tensors
from ops.convert.plan import Formats, Job, Rows, formats_of
from ops.convert.rope import Rotary, scaled

F32: TypeAlias = NDArray[np.float32]

_POOL = 4_194_301  # prime: no multiple of a row's length, so rows beyond one pool length do not repeat
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a random model looks like. `head_dim` None is hidden / heads; `experts` 1 is a dense model without routers; `sliding_window` 0
    is none; `rope_dims` None rotates the whole head; `router` is what the router's object of the descriptor (docs/container.md) says beside
    or instead of a softmax over the chosen."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int
    top_k: int
    vocab: int
    head_dim: int | None = None
    max_context: int = 4096
    sliding_window: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    rope_dims: int | None = None
    rope_style: str = "half"
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    router_bias: bool = False
    router_select_bias: bool = False
    router_expert_scale: bool = False
    router: Mapping[str, Json] = field(default_factory=dict, hash=False)
    tokenizer: bool = True

    @property
    def head_size(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden // self.heads


SHAPES = {
    "mm": ModelShape(layers=8, hidden=1024, heads=16, kv_heads=4, ffn=3584, experts=8, top_k=2, vocab=32000),
    "qm": ModelShape(layers=8, hidden=2048, heads=16, kv_heads=4, ffn=768, experts=64, top_k=8, vocab=50304, qk_norm=True),
    "tiny": ModelShape(layers=3, hidden=96, heads=4, kv_heads=2, ffn=112, experts=4, top_k=2, vocab=512, max_context=512),
}


def make_model(
    out: str | os.PathLike[str],
    shape: ModelShape,
    *,
    quant: str = "int8",
    head: str | None = None,
    seed: int = 1,
    progress: Progress | None = None,
) -> int:
    """Writes a container of `shape` with weights drawn from `seed`; the same seed gives the same file. Returns its size in bytes.
    `quant` and `head` are those of ops.convert.convert. A vocabulary of 259 tokens or more gets a byte-level tokenizer and a chat template,
    unless `shape.tokenizer` is off."""
    if shape.heads % shape.kv_heads or not 1 <= shape.top_k <= shape.experts:
        raise ValueError(f"{shape}: heads must be a multiple of kv_heads, and top_k lie in 1..experts")
    jobs = _jobs(shape, formats_of(quant, head), _Weights(seed))
    descriptor = _descriptor(shape, quant, seed)
    blobs = {}
    if _has_tokenizer(shape):
        blobs = {"tokenizer.json": random_tokenizer(shape.vocab).encode(), "chat_template": _CHAT_TEMPLATE.encode()}
    needed = file_bytes((job.entry for job in jobs), blobs, descriptor_reserve(descriptor))
    with ContainerWriter(Path(out), descriptor, needed_bytes=needed) as writer:
        for name, data in blobs.items():
            writer.add_blob(name, data)
        write_tensors(writer, jobs, progress)
        return writer.commit()


def random_tokenizer(vocab: int) -> str:
    """A tokenizer.json of exactly `vocab` tokens (259 or more): three special ones, every byte, and made-up words, which are never produced
    by encoding but let every token a random model picks be shown."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIAL, *symbols]
    if vocab < len(tokens):
        raise ValueError(f"a byte-level vocabulary has {len(tokens)} tokens or more, not {vocab}")
    tokens += [_word(index) for index in range(vocab - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL])
    return str(tokenizer.to_str())


def _word(index: int) -> str:
    """The index in base 85 (17 consonants, 5 vowels), at least two syllables, after a space."""
    syllables = ""
    while index or len(syllables) < 4:
        index, digit = divmod(index, 85)
        syllables += "bcdfghjklmnprstvz"[digit // 5] + "aeiou"[digit % 5]
    return "Ġ" + syllables


class _Weights:
    """Random matrices cut from one pool of normal numbers at random places: as good as fresh ones here, and no slower than copying."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pool = np.random.default_rng(seed).standard_normal(_POOL, dtype=np.float32)

    def matrix(self, name: str, start: int, stop: int, columns: int, std: float) -> F32:
        """Rows start..stop-1 of the matrix called `name`."""
        count = (stop - start) * columns
        place = int(np.random.default_rng((self._seed, *name.encode(), start)).integers(_POOL))
        values = np.empty(count, np.float32)
        done = 0
        while done < count:
            piece = self._pool[place : place + count - done]
            np.multiply(piece, np.float32(std), out=values[done : done + len(piece)])
            done += len(piece)
            place = 0
        return values.reshape(stop - start, columns)


def _jobs(shape: ModelShape, formats: Formats, weights: _Weights) -> list[Job]:
    linear = formats.linear
    width = shape.heads * shape.head_size
    qkv = width + 2 * shape.kv_heads * shape.head_size
    branch = 1 / math.sqrt(2 * shape.layers)  # keeps the residual stream's size whatever the depth
    vectors = _Vectors(weights, shape)

    def matrix(name: str, fmt: str, rows: int, columns: int, std: float, layout: str = "p32") -> Job:
        entry = TensorEntry(name, layout, fmt, (rows, columns))
        return Job(entry, rows=lambda start, stop: weights.matrix(name, start, stop, columns, std))

    embed_std = 1 / math.sqrt(shape.hidden) if shape.tied else 1.0
    jobs = [matrix("embed", formats.embed(tied=shape.tied), shape.vocab, shape.hidden, embed_std)]
    if not shape.tied:
        jobs.append(matrix("head", formats.head, shape.vocab, shape.hidden, 1 / math.sqrt(shape.hidden)))
    jobs += [vectors.norm("final_norm", shape.hidden), _constant("rope.inv_freq", _rotary(shape).inv_freq)]
    for layer in range(shape.layers):
        prefix = f"layers.{layer}"
        jobs += [
            vectors.norm(f"{prefix}.attn_norm", shape.hidden),
            matrix(f"{prefix}.qkv", linear, qkv, shape.hidden, 1 / math.sqrt(shape.hidden)),
            matrix(f"{prefix}.o", linear, shape.hidden, width, branch / math.sqrt(width)),
            vectors.norm(f"{prefix}.ffn_norm", shape.hidden),
            *vectors.optional(prefix, qkv),
        ]
        if shape.experts > 1:
            jobs.append(matrix(f"{prefix}.router", "f32", shape.experts, shape.hidden, 1 / math.sqrt(shape.hidden), "plain"))
    experts = [(layer, expert) for layer in range(shape.layers) for expert in range(shape.experts)]
    return jobs + [_expert(shape, linear, weights, branch, layer, expert) for layer, expert in experts]


def _expert(shape: ModelShape, fmt: str, weights: _Weights, branch: float, layer: int, expert: int) -> Job:
    name = f"layers.{layer}.experts.{expert}"
    inner, outer = 1 / math.sqrt(shape.hidden), 2 * branch / math.sqrt(shape.ffn)  # SwiGLU of normal numbers is about 0.5 in size

    def load() -> tuple[F32, F32, F32]:
        gate = weights.matrix(f"{name}.gate", 0, shape.ffn, shape.hidden, inner)
        up = weights.matrix(f"{name}.up", 0, shape.ffn, shape.hidden, inner)
        return gate, up, weights.matrix(f"{name}.down", 0, shape.hidden, shape.ffn, outer)

    return Job(TensorEntry(name, "expert", fmt, (shape.ffn, shape.hidden)), expert=load)


@dataclass(frozen=True, slots=True)
class _Vectors:
    """Norms near 1 and small biases."""

    weights: _Weights
    shape: ModelShape

    def norm(self, name: str, size: int) -> Job:
        return self._vector(name, size, lambda values: np.float32(1) + np.float32(0.1) * values)

    def bias(self, name: str, size: int) -> Job:
        return self._vector(name, size, lambda values: np.float32(0.1) * values)

    def optional(self, prefix: str, qkv: int) -> list[Job]:
        shape = self.shape
        jobs = []
        if shape.qk_norm:
            jobs += [self.norm(f"{prefix}.q_norm", shape.head_size), self.norm(f"{prefix}.k_norm", shape.head_size)]
        if shape.qkv_bias:
            jobs.append(self.bias(f"{prefix}.qkv_bias", qkv))
        return jobs + (self._router(prefix) if shape.experts > 1 else [])

    def _router(self, prefix: str) -> list[Job]:
        shape = self.shape
        jobs = [self.bias(f"{prefix}.{name}", shape.experts) for name in ("router_bias", "router_select_bias") if getattr(shape, name)]
        if shape.router_expert_scale:
            jobs.append(self.norm(f"{prefix}.router_expert_scale", shape.experts))
        if shape.router.get("input") == "residual":
            jobs.append(self.norm(f"{prefix}.router_input_scale", shape.hidden))
        return jobs

    def _vector(self, name: str, size: int, change: Callable[[F32], F32]) -> Job:
        return _constant(name, change(self.weights.matrix(name, 0, 1, size, 1.0)[0]))


def _constant(name: str, values: F32) -> Job:
    rows: Rows = lambda start, stop: values[start:stop]  # noqa: E731
    return Job(TensorEntry(name, "plain", "f32", values.shape), rows=rows)


def _rotary(shape: ModelShape) -> Rotary:
    dims = shape.rope_dims if shape.rope_dims is not None else shape.head_size
    return scaled("random model", {}, shape.rope_theta, dims, shape.max_context)


def _has_tokenizer(shape: ModelShape) -> bool:
    return shape.tokenizer and shape.vocab >= len(_SPECIAL) + 256


def _descriptor(shape: ModelShape, quant: str, seed: int) -> dict[str, Json]:
    speaks = _has_tokenizer(shape)
    return {
        "name": f"random-{shape.layers}x{shape.hidden}-{shape.experts}x{shape.ffn}",
        "requires": [],
        "arch": {
            "vocab": shape.vocab,
            "hidden": shape.hidden,
            "layers": shape.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_size,
            "ffn": shape.ffn,
            "experts": shape.experts,
            "max_context": shape.max_context,
            "sliding_window": shape.sliding_window,
            "norm_eps": shape.norm_eps,
            "attention_scale": 1 / math.sqrt(shape.head_size),
            "activation": "silu",
            "rope": {"style": shape.rope_style, "dims": 2 * len(_rotary(shape).inv_freq), "scale": 1.0},
        },
        "router": {
            "score": "softmax_all",
            "k": shape.top_k,
            "weight": "softmax_chosen",
            "renorm": "none",
            "scale": 1.0,
            "apply_at": "output",
            **shape.router,
        },
        "quant": quant,
        "generation": {
            "eos_token_ids": [0, 2] if speaks else [],
            "bos_token_id": 0 if speaks else None,
            "pad_token_id": 0 if speaks else None,
            "add_bos": False,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
        },
        "provenance": {
            "source": f"random weights, seed {seed}",
            "licence": "Apache-2.0",
            "converter": f"colibri {version()}",
            "notes": "random weights: the answers are nonsense",
        },
    }
