"""Every instruction set of this machine: f32, int8 and int4 give the same bits on all of them, bf16 the reference within its bound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import engine_c
from tests.golden import harness, reference
from tests.golden.harness import Containers
from tests.golden.test_parity_quantised import REGRET_BOUND, ROUNDED_BOUND

ISAS = engine_c.isa_available()


@pytest.fixture
def keep_isa() -> Iterator[None]:
    """Leaves the process with the instruction set it had."""
    before = engine_c.isa_name()
    yield
    engine_c.isa_select(before)


def trace(container: Containers, name: str, quant: str, isa: str, kv_format: str = "f32") -> harness.Trace:
    engine_c.isa_select(isa)
    with harness.threads(container(name, quant), lanes=1, kv_format=kv_format) as session:
        return harness.run(session, harness.vectors(name).tokens, chunk=23)


def test_the_specification_is_among_them() -> None:
    assert "generic" in ISAS


@pytest.mark.usefixtures("keep_isa")
@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("quant", ["f32", "int8", "int4", "int4 head int4", "int8 head int4", "int4 head f32"])
@pytest.mark.parametrize("name", harness.NAMES)
def test_bits_equal_on_every_instruction_set(name: str, quant: str, kv_format: str, container: Containers) -> None:
    expected = trace(container, name, quant, "generic", kv_format).bits()
    for isa in ISAS:
        assert trace(container, name, quant, isa, kv_format).bits() == expected, isa


@pytest.mark.usefixtures("keep_isa")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", harness.NAMES)
def test_bf16_meets_its_bound_on_every_instruction_set(name: str, isa: str, container: Containers) -> None:
    got = trace(container, name, "bf16", isa)
    model = reference.from_container(container(name, "bf16"))
    expected = reference.forward(model, harness.vectors(name).tokens, routes=got.experts)
    assert harness.error(got.logits, expected.logits) < ROUNDED_BOUND["bf16"]
    assert expected.regret < REGRET_BOUND["bf16"]
