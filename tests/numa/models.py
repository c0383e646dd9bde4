"""The model the machines compute with: made outside, where that is fast, read inside from the same place."""

from __future__ import annotations

from tests.numa.image import CACHE

MODEL = CACHE / "model.colibri"


def make_model() -> None:
    """Writes it again: the container's format may have changed."""
    from ops import random_model  # not above: inside a machine this takes seconds

    # An expert is 600 KiB, so that its last page, shared with the next node, is below 1 % of it. There is a KV head for each of four nodes.
    shape = random_model.ModelShape(layers=2, hidden=512, heads=8, kv_heads=4, ffn=384, experts=8, top_k=2, vocab=1024, max_context=512)
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    random_model.make_model(MODEL, shape, quant="int8", seed=1)
