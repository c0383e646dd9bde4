"""bf16, int8 and int4 against the f32 model of the same dequantised weights.

Two bounds a format. *Exact*: the reference rounds activations as the engine says it does (kernels.h), so what remains is float32 summation
and the rare activation on a rounding boundary that falls the other way. *Plain* is the cost of the rounding itself: the reference
keeps its activations in float64.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden import harness, reference
from tests.golden.harness import Containers

FORMATS = ("bf16", "int8", "int4")
EXACT = {"bf16": 1e-3, "int8": 1e-3, "int4": 1e-3}
PLAIN = {"bf16": 1e-2, "int8": 3e-2, "int4": 3e-2}


def same_routes(trace: harness.Trace, result: reference.Forward) -> bool:
    return bool(np.array_equal(trace.experts, result.experts))


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("name", harness.NAMES)
def test_format_equals_its_dequantised_weights(name: str, quant: str, kv_format: str, container: Containers) -> None:
    path, tokens = container(name, quant), harness.vectors(name).tokens
    with harness.team(path, workers=0, kv_format=kv_format) as session:
        trace = harness.run(session, tokens, chunk=16)
    model = reference.from_container(path, kv_format=kv_format)
    rounded, plain = reference.forward(model, tokens), reference.forward(model.exact(), tokens)
    print(
        name,
        quant,
        kv_format,
        harness.distance(trace.logits, rounded.logits),
        harness.distance(trace.logits, plain.logits),
        same_routes(trace, rounded),
        same_routes(trace, plain),
    )
