"""What tests of the engine's wrapper share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_c import isa_name, isa_select


@pytest.fixture
def each_isa() -> Iterator[None]:
    """For tests that go through the instruction sets: selects again what was selected before."""
    chosen = isa_name()
    yield
    isa_select(chosen)
