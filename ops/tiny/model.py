"""The model in torch, shaped as Mixtral: grouped-query attention with rotary positions, and in every layer eight experts of which a token
takes the two with the highest gate, weighted by a softmax over those two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes; what trained is the default."""

    vocab: int = 4096
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 512
    experts: int = 8
    top_k: int = 2
    context: int = 1024
    theta: float = 10000.0
    eps: float = 1e-5


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape.hidden)), shape.eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal, three queries to a key; halves of a head rotate against each other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (part(x).view(rows, length, -1, self.shape.head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(rows, length, -1))


class Experts(nn.Module):
    """The router and its experts. `forward` returns the output, the gate logits and the chosen experts, best first.

    While training the experts' products are in bf16, a fifth of the time less; the router and everything else is f32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(shape.experts, shape.ffn, shape.hidden))
        self.w2 = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.ffn))
        self.w3 = nn.Parameter(torch.empty(shape.experts, shape.ffn, shape.hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.gate(flat)
        best, chosen = logits.topk(self.shape.top_k, dim=-1)
        weights = best.softmax(-1)
        out = torch.zeros_like(flat)
        kind = torch.bfloat16 if self.training else flat.dtype
        low, w1, w2, w3 = (tensor.to(kind) for tensor in (flat, self.w1, self.w2, self.w3))
        for expert in range(self.shape.experts):
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            part = low[token]
            inner = functional.silu(part @ w1[expert].T) * (part @ w3[expert].T)
            out = out.index_add(0, token, (inner @ w2[expert].T).to(out.dtype) * weights[token, rank, None])
        return out.view_as(x), logits, chosen


class Layer(nn.Module):
    """Attention, then experts, each behind a norm and beside the residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attn_norm, self.attention = Norm(shape), Attention(shape)
        self.ffn_norm, self.experts = Norm(shape), Experts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attn_norm(x), cos, sin)
        out, logits, chosen = self.experts(self.ffn_norm(x))
        return x + out, logits, chosen


class TinyMoE(nn.Module):
    """Token ids [rows, length] to vocabulary logits, and for each layer gate logits and chosen experts of all tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.final_norm = Norm(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith((".o.weight", ".w2"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cos, sin = rotary(self.shape, ids.shape[1])
        x, routes = self.embed(ids), []
        for layer in self.layers:
            x, logits, chosen = layer(x, cos, sin)
            routes.append((logits, chosen))
        return self.final_norm(x) @ self.embed.weight.T, routes


def rotary(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim / 2]."""
    inverse = shape.theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.arange(length)[:, None] * inverse
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def balance_loss(logits: Tensor, chosen: Tensor) -> Tensor:
    """The auxiliary loss of one layer: 1 if experts are chosen evenly, more if not. Over the whole batch, kinds of text mixed, so that a
    kind may have its own experts."""
    experts = logits.shape[-1]
    share = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
    return experts * (share * logits.softmax(-1).mean(0)).sum()
