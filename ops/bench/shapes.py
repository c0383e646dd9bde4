"""Shapes of random models by name or by eight numbers."""

from __future__ import annotations

import typer

from ops.random_model import SHAPES, ModelShape

FIELDS = ("layers", "hidden", "heads", "kv_heads", "ffn", "experts", "top_k", "vocab")


def parse_shape(text: str) -> ModelShape:
    """'mm', or '8,1024,16,4,3584,8,2,32000' in the order of FIELDS. Raises typer.BadParameter."""
    if text in SHAPES:
        return SHAPES[text]
    words = text.split(",")
    if len(words) != len(FIELDS):
        raise typer.BadParameter(f"--shape {text}: one of {', '.join(SHAPES)}, or {len(FIELDS)} numbers {','.join(FIELDS)}")
    try:
        layers, hidden, heads, kv_heads, ffn, experts, top_k, vocab = numbers = [int(word) for word in words]
    except ValueError as cause:
        raise typer.BadParameter(f"--shape {text}: {cause}") from None
    _check(dict(zip(FIELDS, numbers, strict=True)))
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, experts=experts, top_k=top_k, vocab=vocab
    )


def _check(numbers: dict[str, int]) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise typer.BadParameter(f"--shape: {name} is {value}; it must be at least 1")
    if numbers["hidden"] % numbers["heads"] or numbers["heads"] % numbers["kv_heads"]:
        raise typer.BadParameter("--shape: hidden must be a multiple of heads, and heads of kv_heads")
    if numbers["top_k"] > numbers["experts"]:
        raise typer.BadParameter(f"--shape: top_k {numbers['top_k']} is more than {numbers['experts']} experts")
