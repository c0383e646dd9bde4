"""Containers made from the golden checkpoints, one conversion a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.convert import convert
from tests.golden import harness

Containers = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    """container(name, quant): the path of the golden checkpoint `name` converted to `quant`."""
    folder = tmp_path_factory.mktemp("containers")

    @functools.cache
    def make(name: str, quant: str) -> Path:
        out = folder / f"{name}-{quant}.colibri"
        convert(harness.MODELS / name, out, quant=quant, upcycle=None, descriptor=None, progress=None)
        return out

    return make
