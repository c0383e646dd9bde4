"""The models the machines compute with: made outside, where that is fast, read inside from the same place."""

from __future__ import annotations

from pathlib import Path

from tests.numa.image import CACHE


def model_path(name: str) -> Path:
    """Where a model is."""
    return CACHE / "models" / f"{name}.colibri"


def make_models() -> None:
    """Writes all of them again: the container's format may have changed."""
    from ops.random_model import SHAPES, ModelShape, make_model  # not above: inside a machine this takes seconds

    models = {
        "tiny": SHAPES["tiny"],
        # An expert is 600 KiB and more, so that its last page, shared with the next node, is below 1 % of it.
        "experts": ModelShape(layers=2, hidden=512, heads=8, kv_heads=4, ffn=384, experts=8, top_k=2, vocab=1024, max_context=512),
    }
    for name, shape in models.items():
        path = model_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        make_model(path, shape, quant="int8", seed=1)
