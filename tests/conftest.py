"""Fixtures that several folders of tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, however fast the machine is: what fails once fails again.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """container(name, quant): the golden checkpoint `name` converted to `quant`, once a session.
    "int8 head int4" is int8 with a head of int4."""
    from ops.convert import convert
    from tests.golden import harness

    folder = tmp_path_factory.mktemp("containers")

    @functools.cache
    def make(name: str, quant: str) -> Path:
        out = folder / f"{name}-{quant}.colibri"
        linear, _, head = quant.partition(" head ")
        convert(harness.MODELS / name, out, quant=linear, head=head or None, upcycle=None, descriptor=None, progress=None)
        return out

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A container of the tiny random model, with tokenizer and chat template. What it says is nonsense."""
    from ops.random_model import SHAPES, make_model

    path = tmp_path_factory.mktemp("tiny") / "tiny.colibri"
    make_model(path, SHAPES["tiny"], quant="int8", seed=1)
    return path
