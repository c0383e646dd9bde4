"""bf16, int8 and int4 against their own dequantised weights.

Two references a format. *Rounded* rounds activations as the engine says it does (kernels.h), so what remains is float32 summation and the
rare activation on a rounding boundary that falls the other way. *Plain* keeps its activations in float64: the difference is what
rounding them costs.
"""

from __future__ import annotations

import pytest

from tests.golden import harness, reference
from tests.golden.harness import Containers

FORMATS = ("bf16", "int8", "int4")
PLAIN_BOUND = {"bf16": 1e-2, "int8": 3e-2, "int4": 3e-2}


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("name", harness.NAMES)
def test_format_equals_its_dequantised_weights(name: str, quant: str, kv_format: str, container: Containers) -> None:
    path, tokens = container(name, quant), harness.vectors(name).tokens
    with harness.threads(path, lanes=0, kv_format=kv_format) as session:
        trace = harness.run(session, tokens, chunk=16)
    model = reference.from_container(path, kv_format=kv_format)
    rounded = reference.forward(model, tokens, routes=trace.experts)
    plain = reference.forward(model.exact(), tokens, routes=trace.experts)
    print(
        f"{name} {quant} {kv_format} rounded {harness.distance(trace.logits, rounded.logits):.1e} regret {rounded.regret:.1e} "
        f"plain {harness.distance(trace.logits, plain.logits):.1e} regret {plain.regret:.1e} gap {plain.gap:.1e}"
    )
