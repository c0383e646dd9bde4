"""Rotary scaling against values computed by transformers 5.23.0 (LlamaRotaryEmbedding, head_dim 128, max_position_embeddings 131072)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ops.convert.errors import ConvertError
from ops.convert.rope import scaled

PICKED = [0, 1, 10, 20, 31, 32, 40, 50, 63]  # of the 64 inverse frequencies

CASES: dict[str, tuple[dict[str, Any], float, list[float]]] = {
    "default": (
        {"rope_type": "default", "rope_theta": 10000.0},
        1.0,
        [1.0, 0.865964353, 0.237137362, 0.0562341288, 0.0115478197, 0.00999999978, 0.00316227786, 0.000749894185, 0.000115478193],
    ),
    "linear": (
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0},
        1.0,
        [0.25, 0.203654304, 0.0321718454, 0.00414011022, 0.000434011687, 0.000353553361, 6.85620471e-05, 8.82306904e-06, 6.13785176e-07],
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        1.0,
        [1.0, 0.814617217, 0.128687382, 0.0165604409, 0.00085675146, 0.000524846022, 3.42810235e-05, 4.41153452e-06, 3.06892588e-07],
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000.0},
        1.138629436111989,
        [1.0, 0.805842221, 0.115478203, 0.0133352149, 0.000802959781, 0.000602941145, 4.44569851e-05, 5.13381246e-06, 3.10234441e-07],
    ),
    "yarn without truncation": (
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "rope_theta": 150000.0,
        },
        1.3465735902799727,
        [1.0, 0.830086946, 0.155322984, 0.0193349998, 0.000711837085, 0.000456483918, 1.8188337e-05, 2.82506676e-06, 2.50977735e-07],
    ),
    "yarn with mscale": (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "rope_theta": 10000.0,
        },
        1.0857263992561355,
        [1.0, 0.865964353, 0.237137362, 0.0562341288, 0.00678434409, 0.00550000044, 0.000790569407, 1.87473543e-05, 2.88695469e-06],
    ),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_frequencies_equal_the_reference(name: str) -> None:
    scaling, scale, expected = CASES[name]
    rotary = scaled("test", scaling, scaling["rope_theta"], 128, 131072)
    assert rotary.inv_freq.dtype == np.float32
    np.testing.assert_allclose(rotary.inv_freq[PICKED], np.float32(expected), rtol=5e-7)
    assert rotary.scale == pytest.approx(scale, rel=1e-7)


def test_default_frequencies_have_the_bits_of_the_reference() -> None:
    scaling, _, expected = CASES["default"]
    np.testing.assert_array_equal(scaled("test", scaling, scaling["rope_theta"], 128, 131072).inv_freq[PICKED], np.float32(expected))


def test_old_name_of_the_type_is_read() -> None:
    scaling, _, expected = CASES["linear"]
    old = {"type": "linear", "factor": scaling["factor"]}
    np.testing.assert_allclose(scaled("test", old, scaling["rope_theta"], 128, 4096).inv_freq[PICKED], np.float32(expected), rtol=5e-7)


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"rope_type": "longrope"}, "'longrope' is not supported"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is None"),
        ({"rope_type": "yarn"}, "factor is None"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
    ],
)
def test_what_cannot_be_expressed_is_named(scaling: dict[str, Any], says: str) -> None:
    with pytest.raises(ConvertError, match=says):
        scaled("config.json", scaling, 1e4, 64, 4096)
