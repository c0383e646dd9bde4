"""A plain float64 forward pass of a Mixtral-shaped model, written from the mathematics and not from the engine.

It is the second opinion of the golden tests: checked against transformers' vectors, then used for shapes and formats the vectors do not
cover. Slow and small on purpose; shares no code with `engine_c` or `ops.convert`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden import router_reference

Array = NDArray[np.float64]
GROUP = 32  # columns of a quantisation group (docs/container.md)


@dataclass(frozen=True)
class Layer:
    attn_norm: Array  # [hidden]
    ffn_norm: Array  # [hidden]
    q: Array  # [heads * head_dim, hidden]
    k: Array  # [kv_heads * head_dim, hidden]
    v: Array  # [kv_heads * head_dim, hidden]
    o: Array  # [hidden, heads * head_dim]
    router: Array | None  # [experts, hidden]; None: one expert of weight 1
    experts: tuple[tuple[Array, Array, Array], ...]  # gate [ffn, hidden], up [ffn, hidden], down [hidden, ffn]
    qkv_bias: Array | None = None  # [(heads + 2 kv_heads) * head_dim]
    q_norm: Array | None = None  # [head_dim], before the rotary embedding
    k_norm: Array | None = None
    router_bias: Array | None = None  # [experts], of the logits
    select_bias: Array | None = None  # [experts], of what is compared
    expert_scale: Array | None = None  # [experts], of the weights
    input_scale: Array | None = None  # [hidden]: the router's own norm of the residual stream


@dataclass(frozen=True)
class Model:
    heads: int
    kv_heads: int
    head_dim: int
    top_k: int
    window: int  # positions a query sees, itself included; 0 = all
    eps: float
    scale: float  # of queries
    inv_freq: Array  # [rotated dimensions / 2]
    embed: Array  # [vocab, hidden]
    head: Array  # [vocab, hidden]
    final_norm: Array  # [hidden]
    layers: tuple[Layer, ...]
    interleaved: bool = False  # rotary pairs are (2i, 2i + 1), not (i, i + dims / 2)
    rope_scale: float = 1.0
    router: Mapping[str, Any] = field(default_factory=dict)  # the container's object; empty: softmax over the chosen
    # What the engine rounds a product's left side to: role ("backbone", "expert", "head", "kv") -> format. Empty: nothing is rounded.
    rounding: Mapping[str, str] = field(default_factory=dict)

    def exact(self) -> Model:
        """The same weights with unrounded activations."""
        return Model(**{**self.__dict__, "rounding": {}})


@dataclass(frozen=True)
class Forward:
    logits: Array  # [T, vocab]
    experts: NDArray[np.int32]  # [router layers, T, k], by descending score
    weights: Array  # [router layers, T, k]
    gap: float  # smallest difference of two neighbours among the k + 1 largest that are compared: below ~1e-4 choices may rightly differ
    regret: float  # with given routes: by how much a better one was passed over, at most; 0 if they are the reference's own


def forward(model: Model, tokens: Sequence[int] | NDArray[np.int32], *, routes: NDArray[np.int32] | None = None) -> Forward:
    """Runs a prompt. `routes` [router layers, T, k]: take these experts instead of the best ones (where rounding made another choice of two
    near ties, everything behind it differs; so one compares with the same routes, and the routes by `regret`)."""
    x = model.embed[np.asarray(tokens)]
    experts: list[NDArray[np.int32]] = []
    weights: list[Array] = []
    gap, regret = np.inf, 0.0
    for layer in model.layers:
        x = x + _attention(model, layer, _rmsnorm(x, layer.attn_norm, model.eps))
        y = _rmsnorm(x, layer.ffn_norm, model.eps)
        if layer.router is None:
            x = x + _ffn(model, layer, y, np.zeros((len(y), 1), np.int32), np.ones((len(y), 1)))
            continue
        read = y if layer.input_scale is None else _rmsnorm(x, layer.input_scale, model.eps)
        z = read @ layer.router.T + (0 if layer.router_bias is None else layer.router_bias)
        compared, group_gap = _compared(model, layer, z)
        ids = router_reference.order(compared)[:, : model.top_k] if routes is None else routes[len(experts)]
        w = router_reference.weights(model.router, z, ids, layer.expert_scale)
        x = x + _ffn(model, layer, y, ids, w)
        experts.append(ids)
        weights.append(w)
        ordered = -np.sort(-compared, axis=-1)
        between = ordered[:, : model.top_k] - np.pad(ordered, ((0, 0), (0, 1)), constant_values=-np.inf)[:, 1 : model.top_k + 1]
        gap = min(gap, float(between.min()), float(group_gap.min()))
        regret = max(regret, float(np.max(ordered[:, : model.top_k] - np.take_along_axis(compared, ids, axis=-1))))
    logits = _product(model, "head", _rmsnorm(x, model.final_norm, model.eps), model.head)
    shape = (len(experts), len(x), model.top_k)
    return Forward(logits, np.asarray(experts, np.int32).reshape(shape), np.asarray(weights, np.float64).reshape(shape), gap, regret)


def block(model: Model, number: int, y: Array) -> tuple[Array, NDArray[np.int32], Array, float]:
    """One layer's block of experts on normed rows [T, hidden]: out, experts, weights, and the gap as Forward has it."""
    layer = model.layers[number]
    assert layer.router is not None
    assert layer.input_scale is None
    z = y @ layer.router.T + (0 if layer.router_bias is None else layer.router_bias)
    compared, _ = _compared(model, layer, z)
    ids = router_reference.order(compared)[:, : model.top_k]
    weights = router_reference.weights(model.router, z, ids, layer.expert_scale)
    ordered = -np.sort(-compared, axis=-1)
    gap = float((ordered[:, : model.top_k] - ordered[:, 1 : model.top_k + 1]).min()) if model.top_k < ordered.shape[1] else np.inf
    return _ffn(model, layer, y, ids, weights), ids.astype(np.int32), weights, gap


def _compared(model: Model, layer: Layer, z: Array) -> tuple[Array, Array]:
    """What selection compares, and the gap between groups. The logits themselves where that is the same: gaps are then in their units."""
    if layer.select_bias is None and not router_reference.has_groups(model.router):
        return z, np.full(len(z), np.inf)
    return router_reference.choice(model.router, z, layer.select_bias)


def _rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def _product(model: Model, role: str, x: Array, w: Array) -> Array:
    return round_to(model.rounding.get(role, "f32"), x) @ w.T


def _rotate(model: Model, x: Array) -> Array:
    """Rotary embedding of x [T, heads, head_dim] at positions 0..T-1; dimensions beyond the rotated ones pass."""
    half = len(model.inv_freq)
    angle = np.arange(len(x))[:, None, None] * model.inv_freq
    cos, sin = np.cos(angle) * model.rope_scale, np.sin(angle) * model.rope_scale
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if model.interleaved else (slice(0, half), slice(half, 2 * half))
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def _heads(model: Model, layer: Layer, x: Array) -> tuple[Array, Array, Array]:
    """Queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim], rotated and scaled."""
    x = round_to(model.rounding.get("backbone", "f32"), x)
    q, k, v = x @ layer.q.T, x @ layer.k.T, x @ layer.v.T
    if layer.qkv_bias is not None:
        q, k, v = (t + b for t, b in zip((q, k, v), np.split(layer.qkv_bias, np.cumsum([q.shape[1], k.shape[1]])), strict=True))
    q, k, v = (t.reshape(len(x), -1, model.head_dim) for t in (q, k, v))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _rmsnorm(q, layer.q_norm, model.eps), _rmsnorm(k, layer.k_norm, model.eps)
    return _rotate(model, q) * model.scale, _rotate(model, k), v


def _attention(model: Model, layer: Layer, x: Array) -> Array:
    rows = len(x)
    q, k, v = _heads(model, layer, x)
    kv_format = model.rounding.get("kv", "f32")
    k, v = (np.repeat(round_to(kv_format, t), model.heads // model.kv_heads, axis=1) for t in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k)
    distance = np.arange(rows)[:, None] - np.arange(rows)
    visible = (distance >= 0) & (distance < (model.window or rows))
    scores = np.where(visible, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v).reshape(rows, -1)
    return _product(model, "backbone", out, layer.o)


def _ffn(model: Model, layer: Layer, y: Array, ids: NDArray[np.int32], weights: Array) -> Array:
    out = np.zeros_like(y)
    at_input = model.router.get("apply_at") == "input"
    for e, (gate, up, down) in enumerate(layer.experts):
        rows, slot = np.nonzero(ids == e)
        w = weights[rows, slot][:, None]
        g, u = _product(model, "expert", y[rows], gate), _product(model, "expert", y[rows], up)
        if at_input:  # the expert reads w y; its products are linear in that
            g, u = w * g, w * u
        out[rows] += _product(model, "expert", g / (1 + np.exp(-g)) * u, down) * (1 if at_input else w)
    return out


def round_to(fmt: str, x: Array) -> Array:
    """x [..., k] as the engine rounds it before a product with a matrix of `fmt` (engine_c/src/kernels.h): int8 and int4 to 8 bits with a
    scale per group of 32 columns, a power of two for int4."""
    if fmt == "f32":
        return x
    if fmt == "bf16":
        bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    groups = -(-x.shape[-1] // GROUP)
    padded = np.zeros((*x.shape[:-1], groups * GROUP), np.float32)
    padded[..., : x.shape[-1]] = x
    v = padded.reshape(*x.shape[:-1], groups, GROUP)
    scale = np.abs(v).max(axis=-1, keepdims=True) / np.float32(127)  # in float32, as the engine has it: fewer values fall the other way
    scale[scale == 0] = 1
    if fmt == "int4":
        scale = np.exp2(np.clip(np.ceil(np.log2(scale.astype(np.float64))), -63, 63)).astype(np.float32)
    q = np.clip(np.rint(v / scale), -127, 127).astype(np.float64) * scale
    return np.asarray(q.reshape(padded.shape)[..., : x.shape[-1]], np.float64)


# ---------------------------------------------------------------- where weights come from


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of one .safetensors file (F32 and BF16), as float64."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            flat = (np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F32":
            flat = np.frombuffer(raw[begin:end], np.float32)
        else:
            raise ValueError(f"{path}: tensor {name} has type {entry['dtype']}; golden checkpoints hold F32 and BF16 only")
        tensors[name] = flat.astype(np.float64).reshape(entry["shape"])
    return tensors


def from_checkpoint(folder: Path) -> Model:
    """A Mixtral or Llama checkpoint folder in Hugging Face form."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    t: dict[str, Array] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        t.update(read_safetensors(shard))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]
    embed = t["model.embed_tokens.weight"]
    layers, experts = config["num_hidden_layers"], config.get("num_local_experts")
    return Model(
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        top_k=config.get("num_experts_per_tok", 1),
        window=config.get("sliding_window") or 0,
        eps=config["rms_norm_eps"],
        scale=head_dim**-0.5,
        inv_freq=theta ** -(np.arange(0, head_dim, 2) / head_dim),
        embed=embed,
        head=t.get("lm_head.weight", embed),
        final_norm=t["model.norm.weight"],
        layers=tuple(_checkpoint_layer(t, f"model.layers.{i}.", experts) for i in range(layers)),
    )


def _checkpoint_layer(t: Mapping[str, Array], prefix: str, experts: int | None) -> Layer:
    if experts is None:
        ffn: tuple[tuple[Array, Array, Array], ...] = (
            (t[prefix + "mlp.gate_proj.weight"], t[prefix + "mlp.up_proj.weight"], t[prefix + "mlp.down_proj.weight"]),
        )
    else:
        names = [f"{prefix}block_sparse_moe.experts.{e}." for e in range(experts)]
        ffn = tuple((t[n + "w1.weight"], t[n + "w3.weight"], t[n + "w2.weight"]) for n in names)
    q, k, v, o = (t[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkvo")
    norms = (t[prefix + "input_layernorm.weight"], t[prefix + "post_attention_layernorm.weight"])
    return Layer(*norms, q, k, v, o, t.get(prefix + "block_sparse_moe.gate.weight"), ffn)


def from_container(path: Path, *, kv_format: str = "f32") -> Model:
    """The dequantised weights of a .colibri file, with the rounding its formats imply."""
    from ops.container import Container

    with Container.open(path) as container:
        descriptor: Any = container.descriptor
        arch: dict[str, Any] = descriptor["arch"]
        formats: dict[str, str] = {entry["name"]: entry.get("format", "f32") for entry in descriptor["tensors"]}

        def get(name: str) -> Array:
            return np.asarray(container.dequantise(name)[0], np.float64)

        embed = get("embed")
        return Model(
            heads=arch["heads"],
            kv_heads=arch["kv_heads"],
            head_dim=arch["head_dim"],
            top_k=descriptor["router"]["k"],
            window=arch["sliding_window"],
            eps=arch["norm_eps"],
            scale=arch["attention_scale"],
            inv_freq=get("rope.inv_freq"),
            embed=embed,
            head=get("head") if "head" in formats else embed,
            final_norm=get("final_norm"),
            interleaved=arch["rope"]["style"] == "interleaved",
            rope_scale=arch["rope"]["scale"],
            router=descriptor["router"],
            layers=tuple(_container_layer(container, arch, formats, f"layers.{i}.") for i in range(arch["layers"])),
            rounding={
                "backbone": formats["layers.0.qkv"],
                "expert": formats["layers.0.experts.0"],
                "head": formats.get("head", formats["embed"]),
                "kv": kv_format,
            },
        )


def _container_layer(container: Any, arch: Mapping[str, Any], formats: Mapping[str, str], prefix: str) -> Layer:
    def get(name: str) -> Array:
        return np.asarray(container.dequantise(prefix + name)[0], np.float64)

    heads, kv = arch["heads"] * arch["head_dim"], arch["kv_heads"] * arch["head_dim"]
    q, k, v = np.split(get("qkv"), [heads, heads + kv])
    def optional(name: str) -> Array | None:
        return get(name) if prefix + name in formats else None

    experts = []
    for e in range(arch["experts"]):
        gate, up, down = (np.asarray(a, np.float64) for a in container.dequantise(f"{prefix}experts.{e}"))
        experts.append((gate, up, down))
    return Layer(
        get("attn_norm"),
        get("ffn_norm"),
        q,
        k,
        v,
        get("o"),
        optional("router"),
        tuple(experts),
        qkv_bias=optional("qkv_bias"),
        q_norm=optional("q_norm"),
        k_norm=optional("k_norm"),
        router_bias=optional("router_bias"),
        select_bias=optional("router_select_bias"),
        expert_scale=optional("router_expert_scale"),
        input_scale=optional("router_input_scale"),
    )
