"""Tables of one's own may use every option of a router: settings and tensors arrive in the container, and the engine does what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.container import Container
from ops.convert import convert
from ops.convert.families import TABLES
from tests.golden import harness, reference
from tests.unit.ops.checkpoints import Small, write_folder

PREFIX = "model.layers.{layer}.block_sparse_moe."
ROUTER: dict[str, Any] = {
    "score": {"key": "scoring_func", "sigmoid": "sigmoid", "softmax": "softmax_all"},
    "weight": "unbiased_score",
    "renorm": {"key": "norm_topk_prob", "true": "sum", "false": "none"},
    "renorm_eps": 1e-20,
    "n_group": {"keys": ["n_group"], "default": 1},
    "topk_group": {"keys": ["topk_group"], "default": 1},
    "group_metric": "sum_top2",
    "group_mask": "minus_inf",
    "scale": {"keys": ["routed_scaling_factor"]},
    "apply_at": {"key": "interleave", "null": "output"},
    "input": "residual",
}
SETTINGS = {"scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}


def write(folder: Path, **changes: object) -> tuple[Path, Path, dict[str, Any]]:
    """A Mixtral-shaped checkpoint with every vector a router can have, and the table that reads it."""
    table = json.loads((TABLES / "mixtral.json").read_text())
    table["router"] = ROUTER
    table["tensors"] |= {
        "router_bias": PREFIX + "gate.bias",
        "router_select_bias": PREFIX + "e_score_correction_bias",
        "router_expert_scale": PREFIX + "per_expert_scale",
        "router_input_scale": {"name": PREFIX + "scale", "times": "rsqrt_hidden"},
    }
    small = Small(experts=8, top_k=3, changes={**SETTINGS, **changes})
    weights, rng = small.weights(), np.random.default_rng(1)
    for layer in range(small.layers):
        prefix = PREFIX.format(layer=layer)
        for name, size in (("gate.bias", 8), ("e_score_correction_bias", 8), ("per_expert_scale", 8), ("scale", small.hidden)):
            weights[prefix + name] = rng.uniform(0.1, 1.0, size).astype(np.float32)
    (folder / "table.json").write_text(json.dumps(table))
    return write_folder(folder / "src", small, weights=weights), folder / "table.json", weights


def test_every_option_arrives_and_counts(tmp_path: Path) -> None:
    source, table, weights = write(tmp_path)
    out = tmp_path / "m.colibri"
    convert(source, out, quant="f32", descriptor=table)
    with Container.open(out) as container:
        router = container.descriptor["router"]
        scale = container.dequantise("layers.1.router_input_scale")[0]
    assert router == {
        "score": "sigmoid", "weight": "unbiased_score", "renorm": "sum", "renorm_eps": 1e-20, "n_group": 4, "topk_group": 2,
        "group_metric": "sum_top2", "group_mask": "minus_inf", "scale": 2.5, "apply_at": "output", "input": "residual", "k": 3,
    }  # fmt: skip
    np.testing.assert_allclose(scale, weights[PREFIX.format(layer=1) + "scale"] / np.sqrt(96), rtol=1e-6)
    tokens = np.random.default_rng(2).integers(0, 70, 40).tolist()
    with harness.threads(out, lanes=0) as session:
        trace = harness.run(session, tokens, chunk=40)
    expected = reference.forward(reference.from_container(out), tokens, routes=trace.experts)
    assert expected.regret < 1e-5
    assert harness.distance(trace.logits, expected.logits) < harness.F32_BOUND


@pytest.mark.parametrize(("normed", "renorm"), [(True, "sum"), (False, "none")])
def test_norm_topk_prob_decides_both_ways(tmp_path: Path, normed: bool, renorm: str) -> None:
    source, table, _weights = write(tmp_path, norm_topk_prob=normed, scoring_func="softmax")
    if not normed:
        rules = json.loads(table.read_text())
        del rules["router"]["renorm_eps"]
        table.write_text(json.dumps(rules))
    convert(source, tmp_path / "m.colibri", quant="f32", descriptor=table)
    with Container.open(tmp_path / "m.colibri") as container:
        router: Any = container.descriptor["router"]
    assert (router["score"], router["renorm"]) == ("softmax_all", renorm)
