"""A small random model, and what an undisturbed run of it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.random_model import ModelShape, make_model
from tests.fault.harness import Decoding, config
from workers.team import Team


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of about a millisecond: long enough to be hit in the middle, short enough for many."""
    path = tmp_path_factory.mktemp("fault") / "model.colibri"
    shape = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, ffn=448, experts=8, top_k=2, vocab=1024, max_context=512)
    make_model(path, shape, quant="int8")
    return path


@pytest.fixture(scope="session")
def undisturbed(model: Path) -> list[list[int]]:
    """The tokens of a run in one process."""
    with Team.open(model, config(0)) as team:
        return Decoding().run(team.session)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a tokenizer; prompts of 1500 tokens take it a good part of a second."""
    path = tmp_path_factory.mktemp("served") / "model.colibri"
    shape = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, ffn=448, experts=8, top_k=2, vocab=1024, max_context=2048)
    make_model(path, shape, quant="int8")
    return path
