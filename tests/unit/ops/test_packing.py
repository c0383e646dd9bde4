"""The C packer against the layout as docs/container.md words it."""

from __future__ import annotations

import numpy as np
import pytest

from engine_c import EngineError
from engine_c.packing import expert_bytes, pack, pack_expert, packed_bytes, unpack, unpack_expert
from tests.unit.ops.layout_reference import decode, decode_expert, encode, packed_size

FORMATS = ("f32", "bf16", "int8", "int4")
SHAPES = ((1, 1), (32, 32), (33, 31), (70, 96), (17, 130))
# Largest error in units of the largest magnitude. bf16 has 8 significant bits; int8's step is amax / 127, half of it lost at a rounding
# (and a little for the scale's own rounding to fp16). int4 trades its largest error for the mean: 4 bits leave 8 % of normal weights' size.
BOUND = {"f32": 0.0, "bf16": 1 / 256, "int8": 0.51 / 127}
INT4_RMS_BOUND = 0.1


def assert_close(fmt: str, decoded: np.ndarray, w: np.ndarray) -> None:
    error = decoded - w
    if fmt == "int4":
        assert np.sqrt((error**2).mean()) <= INT4_RMS_BOUND * np.sqrt((w**2).mean())
    else:
        assert np.abs(error).max() <= BOUND[fmt] * np.abs(w).max()


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, k)) * np.exp(rng.normal(size=(n, 1)))).astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_bytes_are_where_the_document_says(fmt: str, shape: tuple[int, int]) -> None:
    w = weights(*shape)
    packed = pack(fmt, w).tobytes()
    assert len(packed) == packed_size(fmt, *shape) == packed_bytes(fmt, *shape)
    decoded = decode(fmt, packed, *shape)
    np.testing.assert_array_equal(unpack(fmt, packed, *shape), decoded)
    assert_close(fmt, decoded, w)


@pytest.mark.parametrize("fmt", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_bytes_equal_the_reference_encoder(fmt: str, shape: tuple[int, int]) -> None:
    w = weights(*shape, seed=1)
    assert pack(fmt, w).tobytes() == encode(fmt, w)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("hidden", "ffn"), [(32, 16), (96, 112), (33, 47), (160, 33)])
def test_expert_blocks_interleave_gate_and_up(fmt: str, hidden: int, ffn: int) -> None:
    gate, up, down = weights(ffn, hidden, 2), weights(ffn, hidden, 3), weights(hidden, ffn, 4)
    packed = pack_expert(fmt, gate, up, down).tobytes()
    assert len(packed) == expert_bytes(fmt, hidden, ffn)
    decoded = decode_expert(fmt, packed, hidden, ffn)
    for ours, expected, source in zip(unpack_expert(fmt, packed, hidden, ffn), decoded, (gate, up, down), strict=True):
        np.testing.assert_array_equal(ours, expected)
        assert_close(fmt, ours, source)


@pytest.mark.parametrize("fmt", FORMATS)
def test_packing_whole_panels_at_a_time_gives_the_same_bytes(fmt: str) -> None:
    w = weights(200, 70, 5)
    pieces = [pack(fmt, w[start : start + 64]) for start in range(0, 200, 64)]
    assert np.concatenate(pieces).tobytes() == pack(fmt, w).tobytes()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused(fmt: str, bad: float) -> None:
    w = weights(40, 40)
    w[37, 39] = bad
    with pytest.raises(EngineError) as caught:
        pack(fmt, w)
    assert caught.value.name == "ENUMERIC"
