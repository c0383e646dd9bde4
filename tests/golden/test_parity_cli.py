"""`colibri logits`, as a person runs it, meets the bounds; and every instruction set that COLIBRI_ISA can force gives the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import engine_c
from tests.golden import harness
from tests.golden.harness import Containers

ROOT = Path(__file__).parents[2]


def logits_command(path: Path, out: Path, tokens: np.ndarray, *options: str) -> list[str]:
    listed = ",".join(str(t) for t in tokens)
    return [sys.executable, "-m", "ops.cli", "logits", str(path), "--tokens", listed, "--out", str(out), *options]


def colibri_logits(path: Path, out: Path, *options: str, tokens: np.ndarray, isa: str | None = None) -> dict[str, np.ndarray]:
    environment = {**os.environ, **({} if isa is None else {"COLIBRI_ISA": isa})}
    subprocess.run(logits_command(path, out, tokens, *options), check=True, cwd=ROOT, env=environment, timeout=60)
    with np.load(out) as file:
        return dict(file)


@pytest.mark.parametrize("name", harness.NAMES)
def test_logits_command_equals_transformers(name: str, container: Containers, tmp_path: Path) -> None:
    vectors = harness.vectors(name)
    got = colibri_logits(
        container(name, "f32"), tmp_path / "out.npz", "--greedy", "24", "--workers", "1", "--chunk", "16", tokens=vectors.tokens
    )
    assert harness.distance(got["logits"], vectors.logits) < harness.F32_BOUND
    np.testing.assert_array_equal(got["experts"], vectors.experts)
    np.testing.assert_allclose(got["weights"], vectors.weights, rtol=0, atol=harness.WEIGHT_BOUND)
    np.testing.assert_array_equal(got["greedy"], vectors.greedy)
    np.testing.assert_array_equal(got["layers"], np.arange(len(vectors.experts)))
    assert {key: (value.dtype.name, value.ndim) for key, value in got.items()} == {
        "logits": ("float32", 2),
        "layers": ("int32", 1),
        "experts": ("int32", 3),
        "weights": ("float32", 3),
        "greedy": ("int32", 1),
    }


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_logits_command_gives_the_same_bits_with_any_workers(workers: int, container: Containers, tmp_path: Path) -> None:
    path, tokens = container("window", "int4"), harness.vectors("window").tokens
    with harness.threads(path, lanes=0) as session:
        expected = harness.run(session, tokens, chunk=64)
    for chunk in (1, 5, 64):
        got = colibri_logits(path, tmp_path / "out.npz", "--workers", str(workers), "--chunk", str(chunk), tokens=tokens)
        assert harness.Trace(got["logits"], got["experts"], got["weights"]).bits() == expected.bits(), f"chunks of {chunk}"


@pytest.mark.parametrize("isa", engine_c.isa_available())
@pytest.mark.parametrize("quant", ["f32", "int8"])
def test_forced_instruction_set_reaches_the_workers(isa: str, quant: str, container: Containers, tmp_path: Path) -> None:
    path, tokens = container("window", quant), harness.vectors("window").tokens
    with harness.threads(path, lanes=0) as session:
        expected = harness.run(session, tokens, chunk=64)
    got = colibri_logits(path, tmp_path / "out.npz", "--workers", "1", tokens=tokens, isa=isa)
    assert harness.Trace(got["logits"], got["experts"], got["weights"]).bits() == expected.bits()


def test_unknown_instruction_set_is_refused_by_name(container: Containers, tmp_path: Path) -> None:
    command = logits_command(container("window", "f32"), tmp_path / "out.npz", np.arange(4))
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "COLIBRI_ISA": "sse9"}, timeout=60, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "sse9" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
