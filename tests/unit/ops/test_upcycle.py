"""Upcycling: any pair of experts is the dense layer, whatever the router picks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ops.container import Container
from ops.convert import convert
from ops.logits import compute_logits
from tests.unit.ops.checkpoints import Small, write_folder
from tests.unit.ops.failures import refused

DENSE = Small(experts=1, layers=3)
PAIRS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upcycled")
    source = write_folder(folder / "src", DENSE)
    convert(source, folder / "dense.colibri", quant="f32")
    convert(source, folder / "moe.colibri", quant="f32", upcycle=f"pairs={PAIRS}", seed=7)
    return folder


@pytest.fixture
def moe(folder: Path) -> Iterator[Container]:
    with Container.open(folder / "moe.colibri") as container:
        yield container


def test_scalars_say_what_was_made(moe: Container) -> None:
    arch = moe.descriptor["arch"]
    assert (arch["experts"], arch["ffn"], moe.descriptor["router"]["k"]) == (2 * PAIRS, DENSE.ffn // 2, 2)
    assert "pairs=3, seed 7" in moe.descriptor["provenance"]["notes"]


def test_every_pair_is_the_whole_dense_layer(moe: Container) -> None:
    weights = DENSE.weights()
    for layer in range(DENSE.layers):
        prefix = f"model.layers.{layer}.mlp."
        gate, up, down = (weights[f"{prefix}{role}_proj.weight"] for role in ("gate", "up", "down"))
        for pair in range(PAIRS):
            halves = [moe.dequantise(f"layers.{layer}.experts.{2 * pair + half}") for half in range(2)]
            neurons = {row.tobytes(): index for index, row in enumerate(gate)}
            order = [neurons[row.tobytes()] for half in halves for row in half[0]]
            assert sorted(order) == list(range(DENSE.ffn)), "each neuron is in exactly one of the two experts"
            np.testing.assert_array_equal(np.concatenate([half[1] for half in halves]), up[order])
            np.testing.assert_array_equal(np.concatenate([half[2] for half in halves], axis=1), 2 * down[:, order])


def test_pairs_are_split_differently(moe: Container) -> None:
    firsts = {
        frozenset(row.tobytes() for row in moe.dequantise(f"layers.{layer}.experts.{2 * pair}")[0])
        for layer in range(DENSE.layers)
        for pair in range(PAIRS)
    }
    assert len(firsts) == DENSE.layers * PAIRS


def test_experts_of_a_pair_share_their_router_row(moe: Container) -> None:
    for layer in range(DENSE.layers):
        router = moe.dequantise(f"layers.{layer}.router")[0]
        np.testing.assert_array_equal(router[0::2], router[1::2])
        np.testing.assert_allclose(np.linalg.norm(router, axis=1), 1, rtol=1e-6)
        assert len(np.unique(router, axis=0)) == PAIRS


def test_upcycled_model_answers_as_the_dense_one(folder: Path) -> None:
    tokens = list(range(3, 43))
    dense = compute_logits(folder / "dense.colibri", tokens=tokens)
    moe = compute_logits(folder / "moe.colibri", tokens=tokens)
    # Both are f32; only the order of the sum over neurons differs.
    np.testing.assert_allclose(moe.logits, dense.logits, atol=1e-4 * np.abs(dense.logits).max())
    pairs = np.sort(moe.experts, axis=-1)
    assert (pairs[..., 0] % 2 == 0).all()
    assert (pairs[..., 1] == pairs[..., 0] + 1).all()
    assert (moe.weights == 0.5).all()
    assert len(np.unique(pairs[..., 0])) == PAIRS, "the router uses every pair"


def test_seed_decides_and_nothing_else(tmp_path: Path, folder: Path) -> None:
    for name, seed in (("same", 7), ("other", 8)):
        convert(folder / "src", tmp_path / name, quant="f32", upcycle=f"pairs={PAIRS}", seed=seed)
    assert (tmp_path / "same").read_bytes() == (folder / "moe.colibri").read_bytes()
    with Container.open(tmp_path / "other") as other, Container.open(folder / "moe.colibri") as moe:
        assert other.tensor("layers.0.experts.0") != moe.tensor("layers.0.experts.0")
        assert other.tensor("layers.0.router") != moe.tensor("layers.0.router")
        assert other.tensor("layers.0.qkv") == moe.tensor("layers.0.qkv")


@pytest.mark.parametrize("recipe", ["", "pairs", "pairs=0", "pairs=-1", "pairs=4x", "clones=4"])
def test_unknown_recipe_is_named(tmp_path: Path, folder: Path, recipe: str) -> None:
    assert f"{recipe!r} is unknown" in refused(folder / "src", tmp_path / "out.colibri", upcycle=recipe)


def test_odd_number_of_neurons_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "src", replace(DENSE, ffn=111))
    assert "111 neurons" in refused(source, tmp_path / "out.colibri", upcycle="pairs=2")
