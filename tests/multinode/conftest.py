"""Networks of namespaces for a module of tests, where the machine can make them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.random_model import ModelShape, make_model
from tests.fault.load import Answer
from tests.multinode import net
from tests.multinode.net import Network
from tests.multinode.watching import local_answers

_reason = functools.cache(net.why_not)


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    """Skips everything, and says so, where there can be no network namespaces."""
    if reason := _reason():
        pytest.skip(f"NOT TESTED: many nodes in a network. {reason}")


@pytest.fixture(scope="module")
def network(possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """One a module."""
    with net.network(tmp_path_factory.mktemp("network")) as made:
        yield made


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of nine experts, so that three nodes share them evenly; every step takes it well under a millisecond."""
    path = tmp_path_factory.mktemp("model") / "small.colibri"
    shape = ModelShape(layers=4, hidden=128, heads=4, kv_heads=2, ffn=192, experts=9, top_k=3, vocab=1024, max_context=1024)
    make_model(path, shape, quant="int8", seed=3)
    return path


@pytest.fixture(scope="session")
def expected(small_model: Path) -> list[Answer]:
    """What it answers all by itself."""
    return local_answers(small_model)
