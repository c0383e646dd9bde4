"""Batch invariance: a row's bits do not depend on what else is in the step, in which order, or on how many lanes compute it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import engine_c
from ops.convert import convert
from tests.golden import harness, reference
from tests.golden.harness import Containers
from tests.golden.reference import read_safetensors
from tests.golden.test_parity_quantised import ROUNDED_BOUND

FORMATS = ("f32", "bf16", "int8", "int4")
MIXED = (*FORMATS, "int4 head int4")  # and a head of another format than usual
LANES = (0, 1, 3)
# Around the kernels' tiles (1, 2, 3, 5, 6, 8 rows), the KV block (16), the group (32) and the attention chunk (64).
ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64)


def prompts(seed: int, lengths: list[int], vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def alone(path: Path, batch: list[list[int]]) -> list[harness.Trace]:
    with harness.threads(path, lanes=0) as session:
        return [harness.run(session, prompt, chunk=64) for prompt in batch]


@pytest.mark.parametrize("quant", MIXED)
@pytest.mark.parametrize("name", ["window", "top3", "dense-llama"])
def test_any_mix_of_prefill_and_decode_equals_each_alone(name: str, quant: str, container: Containers) -> None:
    path = container(name, quant)
    vocab = harness.vectors(name).logits.shape[1]
    batch = prompts(1, [1, 2, 7, 16, 17, 23, 31, 33, 40, 48, 64, 65], vocab)
    expected = alone(path, batch)
    for lanes in LANES:
        with harness.threads(path, lanes=lanes) as session:
            for seed in range(3):
                runs = harness.place(batch, seed=seed)
                step_at_random(session, runs, seed)
                for i, (run, trace) in enumerate(zip(runs, expected, strict=True)):
                    assert run.trace().bits() == trace.bits(), f"sequence {i}, {lanes} lanes, seed {seed}"


def step_at_random(session: engine_c.Session, runs: list[harness.Run], seed: int) -> None:
    """Steps a random choice of the sequences, in random order, each by one token or by a random chunk, until all are through."""
    rng = np.random.default_rng(seed)
    while waiting := [run for run in runs if run.left]:
        chosen = rng.permutation(len(waiting))[: rng.integers(1, len(waiting) + 1)]
        budget, parts = 128, []
        for i in chosen:
            rows = 1 if rng.random() < 0.5 else int(rng.integers(1, waiting[i].left + 1))
            rows = min(rows, budget)
            if rows:
                parts.append((waiting[i], rows))
                budget -= rows
        harness.step(session, parts)


@pytest.mark.parametrize("quant", MIXED)
def test_row_counts_around_every_boundary_equal_one_row_at_a_time(quant: str, container: Containers) -> None:
    """`rows` rows of one prompt, and one row of `rows` prompts."""
    path = container("window", quant)
    batch = prompts(2, [3] * 64, 259)
    (whole,) = prompts(3, [64], 259)
    with harness.threads(path, lanes=1) as session:
        one_by_one = harness.run(session, whole, chunk=1)
        expected = [harness.run(session, prompt, chunk=1) for prompt in batch]
        for rows in ROWS:
            chunk = harness.run(session, whole[:rows], chunk=rows, seed=rows)
            assert chunk.logits.tobytes() == one_by_one.logits[:rows].tobytes(), f"{rows} rows of one sequence"
            runs = harness.place(batch[:rows], seed=rows)
            for _ in range(3):
                harness.step(session, [(run, 1) for run in runs])
            for run, trace in zip(runs, expected, strict=False):
                assert run.trace().bits() == trace.bits(), f"{rows} sequences of one row"


def rerouted(folder: Path, name: str, gate: np.ndarray) -> Path:
    """The golden checkpoint `name` with every router replaced by `gate` [experts, hidden]."""
    source = harness.MODELS / name
    tensors = {
        k: (gate if k.endswith("gate.weight") else v) for shard in source.glob("*.safetensors") for k, v in read_safetensors(shard).items()
    }
    harness.write_checkpoint(folder, json.loads((source / "config.json").read_text()), tensors)
    return folder


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize(("name", "k"), [("top1", 1), ("window", 2)])
def test_one_expert_with_all_rows_and_the_others_with_none(name: str, k: int, quant: str, tmp_path: Path) -> None:
    """A router of zeros: all gates tie, and ties go to the lower index."""
    source = rerouted(tmp_path / "checkpoint", name, np.zeros((5, 96)))
    path = tmp_path / "model.colibri"
    convert(source, path, quant=quant, upcycle=None, descriptor=None, progress=None)
    tokens = harness.vectors(name).tokens
    with harness.threads(path, lanes=2) as session:
        single = harness.run(session, tokens, chunk=1)
        for chunk in (2, 7, 16, 33, 64):
            trace = harness.run(session, tokens, chunk=chunk)
            assert trace.bits() == single.bits(), f"chunks of {chunk}"
    assert np.all(single.experts == np.arange(k))
    assert np.all(single.weights == 1 / k)
    result = reference.forward(reference.from_container(path), tokens)
    assert harness.error(single.logits, result.logits) < ROUNDED_BOUND[quant]


def test_experts_with_no_row_one_row_and_several_share_a_step(container: Containers) -> None:
    """Small steps over natural routes: the counts below did occur, and each step equals its rows alone."""
    path, vectors = container("top1", "int8"), harness.vectors("top1")
    tokens, seen = vectors.tokens, set()
    with harness.threads(path, lanes=1) as session:
        single = harness.run(session, tokens, chunk=1)
        for chunk in (2, 3, 4, 6):
            trace = harness.run(session, tokens, chunk=chunk)
            assert trace.bits() == single.bits()
            for start in range(0, len(tokens), chunk):
                for layer in trace.experts[:, start : start + chunk, 0]:
                    seen |= set(np.bincount(layer, minlength=5).tolist())
    assert {0, 1, 2, 3} <= seen


@pytest.mark.parametrize("quant", ["f32", "int4"])
def test_rows_without_logits_change_nothing(quant: str, container: Containers) -> None:
    """A prefill that asks for its last row only, or for none and then one, gives that row's bits."""
    path, tokens = container("tied", quant), [int(t) for t in harness.vectors("tied").tokens]
    blocks = list(range(8))
    with harness.threads(path, lanes=1) as session:
        expected = harness.run(session, tokens, chunk=64).logits[-1].tobytes()
        session.step([engine_c.SeqWork(tokens=tokens, start=0, blocks=blocks, n_logits=1)])
        assert session.logits().tobytes() == expected
        for split in (1, 16, 40, len(tokens) - 1):
            session.step([engine_c.SeqWork(tokens=tokens[:split], start=0, blocks=blocks)])
            session.step([engine_c.SeqWork(tokens=tokens[split:], start=split, blocks=blocks, n_logits=1)])
            assert session.logits().tobytes() == expected, f"split at {split}"


def test_sequences_may_share_the_blocks_of_a_common_prefix(container: Containers) -> None:
    """Two continuations of one prefix, its full blocks computed once and read by both, equal each computed alone."""
    path = container("tied", "int8")
    prefix, left, right = prompts(4, [32, 9, 13], 512)
    expected = [trace.logits[32:].tobytes() for trace in alone(path, [prefix + left, prefix + right])]
    with harness.threads(path, lanes=1) as session:
        session.step([engine_c.SeqWork(tokens=prefix, start=0, blocks=[5, 3])])
        work = [engine_c.SeqWork(tokens=tail, start=32, blocks=[5, 3, own], n_logits=len(tail)) for tail, own in ((right, 9), (left, 0))]
        session.step(work)
        logits = session.logits()
    assert [logits[13:].tobytes(), logits[:13].tobytes()] == expected


def test_sampled_tokens_and_logprobs_do_not_depend_on_the_batch(container: Containers) -> None:
    path = container("window", "int8")
    batch = prompts(5, [5, 12, 20, 1, 17, 33, 8, 9], 259)
    work = []
    for i, run in enumerate(harness.place(batch)):
        sampling = engine_c.Sampling(
            temperature=0.3 * i,
            top_p=1 - 0.05 * i,
            min_p=0.01 * i,
            repetition_penalty=1 + 0.1 * i,
            top_k=30 * (i % 3),
            top_logprobs=i,
            seed=i,
        )
        rows = len(run.tokens)
        work.append(dataclasses.replace(run.work(rows), sampling=sampling, history=run.tokens, targets=[(t + i) % 259 for t in run.tokens]))
    with harness.threads(path, lanes=2) as session:
        expected = [session.step([one])[0][0] for one in work]
        for seed in range(5):
            order = np.random.default_rng(seed).permutation(len(work))
            results, _stats = session.step([work[i] for i in order])
            assert results == [expected[i] for i in order]


def test_two_sessions_of_one_model_do_not_disturb_each_other(container: Containers) -> None:
    path = container("top3", "bf16")
    first, second = prompts(6, [40, 50], 131)
    expected = [trace.bits() for trace in alone(path, [first, second])]
    with harness.threads(path, lanes=1) as one, harness.threads(path, lanes=0) as other:
        runs = [harness.place([first])[0], harness.place([second])[0]]
        for _ in range(5):
            harness.step(one, [(runs[0], 8)])
            harness.step(other, [(runs[1], 10)])
    assert [run.trace().bits() for run in runs] == expected
