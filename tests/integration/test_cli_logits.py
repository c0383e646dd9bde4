"""`colibri logits` as its users run it: the file's contract, and the same bits whoever computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ops.random_model import SHAPES, make_model

TOKENS = [7, 300, 12, 12, 511, 0, 45, 99, 200, 301, 17, 18, 19, 450, 2, 33, 64, 65, 66]  # longer than a KV block
GREEDY = 6


@pytest.fixture(scope="module", params=["f32", "int8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logits") / f"tiny-{request.param}.colibri"
    make_model(path, SHAPES["tiny"], quant=request.param)
    return path


def logits(model: Path, out: Path, *extra: str, tokens: list[int] = TOKENS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ops.cli", "logits", str(model), "--tokens", ",".join(map(str, tokens)), "--out", str(out), *extra]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def load(model: Path, out: Path, *extra: str) -> dict[str, np.ndarray]:
    done = logits(model, out, "--greedy", str(GREEDY), *extra)
    assert done.returncode == 0, done.stderr
    with np.load(out) as file:
        return dict(file)


def test_file_holds_what_is_promised(model: Path, tmp_path: Path) -> None:
    shape, result = SHAPES["tiny"], load(model, tmp_path / "a.npz")
    routes = (shape.layers, len(TOKENS), shape.top_k)
    expected = {
        "logits": ((len(TOKENS), shape.vocab), np.float32),
        "layers": ((shape.layers,), np.int32),
        "experts": (routes, np.int32),
        "weights": (routes, np.float32),
        "greedy": ((GREEDY,), np.int32),
    }
    assert {name: (array.shape, array.dtype.type) for name, array in result.items()} == expected
    assert np.array_equal(result["layers"], np.arange(shape.layers))
    assert np.isfinite(result["logits"]).all()
    np.testing.assert_allclose(result["weights"].sum(axis=2), 1.0, rtol=1e-6)
    assert result["greedy"][0] == result["logits"][-1].argmax()


def test_bits_do_not_depend_on_workers_or_chunks(model: Path, tmp_path: Path) -> None:
    alone = load(model, tmp_path / "alone.npz")
    for workers, chunk in ((0, 1), (1, 5), (2, 16), (3, 3), (1, 17)):
        other = load(model, tmp_path / "other.npz", "--workers", str(workers), "--chunk", str(chunk))
        for name, array in alone.items():
            assert array.tobytes() == other[name].tobytes(), f"{name} with {workers} workers and chunks of {chunk}"


def test_greedy_tokens_are_what_the_longer_prompt_would_give(model: Path, tmp_path: Path) -> None:
    greedy = load(model, tmp_path / "a.npz")["greedy"].tolist()
    assert logits(model, tmp_path / "b.npz", tokens=[*TOKENS, *greedy]).returncode == 0
    with np.load(tmp_path / "b.npz") as file:
        assert file["logits"][len(TOKENS) - 1 : -1].argmax(axis=1).tolist() == greedy


@pytest.mark.parametrize(
    ("tokens", "extra", "named"),
    [
        ([1, 512], [], "token 512 at position 1"),
        ([1, -1], [], "token -1 at position 1"),
        ([5] * 500, ["--greedy", "13"], "context of 512"),
    ],
)
def test_prompt_that_does_not_fit_is_refused_and_writes_nothing(
    model: Path, tmp_path: Path, tokens: list[int], extra: list[str], named: str
) -> None:
    done = logits(model, tmp_path / "o.npz", *extra, tokens=tokens)
    assert done.returncode == 1
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_output_folder_that_is_missing_is_named(model: Path, tmp_path: Path) -> None:
    done = logits(model, tmp_path / "nowhere" / "o.npz")
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1
