"""Filling the C arrays of a step and reading its results, without an engine behind them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine_c import Sampling, SeqWork, SessionOptions
from engine_c._engine import ffi, lib
from engine_c.batch import BatchBuffers

LAYERS = 5


def small() -> BatchBuffers:
    return BatchBuffers(SessionOptions(max_rows=4, max_seqs=2, max_logit_rows=2), LAYERS)


def read(buffers: BatchBuffers) -> list[SeqWork]:
    """The batch as C sees it."""
    batch, work = buffers.batch, []
    at = {"tokens": 0, "blocks": 0, "history": 0, "targets": 0}

    def take(name: str, count: int) -> list[int]:
        at[name] += count
        return [getattr(batch, name)[i] for i in range(at[name] - count, at[name])]

    for i in range(batch.n_seqs):
        seq = batch.seqs[i]
        s = seq.sampling
        sampling = Sampling(s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.top_k, s.top_logprobs, s.seed)
        tokens, blocks = take("tokens", seq.n_rows), take("blocks", seq.n_blocks)
        history = tuple(take("history", seq.n_history))
        targets = take("targets", seq.n_logits) if batch.targets != ffi.NULL else None
        work.append(SeqWork(tokens, seq.start, blocks, seq.n_logits, sampling, history, targets))
    return work


def test_a_batch_arrives_whole_also_when_it_outgrows_the_arrays() -> None:
    rng = random.Random(1)
    buffers = small()
    for size in (1, 2, 40, 3, 0, 500, 7):
        work = []
        for _ in range(size):
            n = rng.randint(1, 60)
            logits = rng.randint(0, n)
            work.append(
                SeqWork(
                    tokens=[rng.randrange(2**31) for _ in range(n)],
                    start=rng.randrange(2**20),
                    blocks=[rng.randrange(2**31) for _ in range(rng.randint(1, 90))],
                    n_logits=logits,
                    sampling=Sampling(temperature=0.5, seed=rng.randrange(2**64), top_k=rng.randrange(100)),
                    history=tuple(range(rng.randint(0, 50))),
                    targets=[rng.randint(-1, 100) for _ in range(logits)],
                )
            )
        buffers.fill(work)
        assert read(buffers) == work
        assert buffers.n_rows == sum(w.n_logits for w in work)


def test_a_batch_that_continues_the_last_arrives_whole() -> None:
    rng = random.Random(2)
    buffers = BatchBuffers(SessionOptions(max_rows=8, max_seqs=8, max_logit_rows=8), LAYERS)
    work = [SeqWork([5], 15, [100 * i], 1, Sampling(temperature=0.5, seed=i)) for i in range(5)]
    for _ in range(200):
        for w in work:
            w.tokens, w.start = [rng.randrange(2**31)], w.start + 1
            if w.start % 16 == 0:
                w.blocks = [*w.blocks, w.start] if rng.random() < 0.3 else _grown(w.blocks, w.start)
        chosen = work if rng.random() < 0.7 else rng.sample(work, rng.randrange(5))
        changed = [dataclasses.replace(w, **rng.choice(CHANGES)) if rng.random() < 0.05 else w for w in chosen]
        buffers.fill(changed)
        assert read(buffers) == _seen(changed)
        assert buffers.n_rows == sum(w.n_logits for w in changed)


def _seen(work: list[SeqWork]) -> list[SeqWork]:
    """Targets are there for all or for none."""
    if all(w.targets is None for w in work):
        return work
    return [dataclasses.replace(w, targets=[-1] * w.n_logits) if w.targets is None else w for w in work]


CHANGES: list[dict[str, Any]] = [
    {"tokens": [1, 2, 3]}, {"n_logits": 0}, {"history": (4, 5)}, {"targets": [7]}, {"sampling": Sampling(top_k=3)}, {"blocks": [1, 2]},
]


def _grown(blocks: Sequence[int], block: int) -> Sequence[int]:
    assert isinstance(blocks, list)
    blocks.append(block)
    return blocks


def test_a_batch_refused_half_way_leaves_nothing_to_continue() -> None:
    buffers = small()
    work = [SeqWork([1], 0, [0], 1), SeqWork([2], 0, [1], 1)]
    buffers.fill(work)
    with pytest.raises(OverflowError):
        buffers.fill([dataclasses.replace(work[0], tokens=[9]), dataclasses.replace(work[1], start=2**31)])
    buffers.fill(work)
    assert read(buffers) == work


def test_targets_are_minus_one_for_sequences_without_and_null_without_any() -> None:
    buffers = small()
    buffers.fill([SeqWork([1], 0, [0], 1), SeqWork([2], 0, [1], 1, targets=[9])])
    assert [buffers.batch.targets[i] for i in range(2)] == [-1, 9]
    buffers.fill([SeqWork([1], 0, [0], 1)])
    assert buffers.batch.targets == ffi.NULL


def test_targets_that_do_not_match_their_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1: 2 targets for 1 rows"):
        small().fill([SeqWork([1], 0, [0], 1), SeqWork([2], 0, [1], 1, targets=[9, 9])])


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1])
def test_numbers_that_no_c_integer_holds_are_refused(bad: int) -> None:
    with pytest.raises(OverflowError):
        small().fill([SeqWork([bad], 0, [0])])


def test_rows_come_back_by_sequence() -> None:
    buffers = small()
    work = [SeqWork([1, 2, 3], 0, [0], 2), SeqWork([4], 0, [1], 0), SeqWork([5], 7, [2], 1)]
    buffers.fill(work)
    for i in range(3):
        row = buffers.rows[i]
        row.token, row.logprob, row.target_rank, row.n_top = 10 + i, -0.5 * i, -1, i
        row.top_tokens[0:2] = [20 + i, 30 + i]
        row.top_logprobs[0:2] = [-0.25, -1.5]
    first, middle, last = buffers.results(work)
    assert [row.token for row in first.rows] == [10, 11]
    assert (middle.ok, middle.rows) == (True, ())
    assert last.rows[0].top == ((22, -0.25), (32, -1.5))
    assert first.rows[0].top == ()
    assert last.rows[0].logprob == -1.0


@pytest.mark.parametrize(("layer", "place"), [(0, "layer 0"), (LAYERS - 1, "layer 4"), (LAYERS, "the head")])
def test_a_nan_is_reported_with_layer_and_position_and_only_where_it_was(layer: int, place: str) -> None:
    buffers = small()
    work = [SeqWork([1], 3, [0], 1), SeqWork([1, 2, 3, 4], 10, [1], 3), SeqWork([9] * 5, 20, [2, 3], 0)]
    buffers.fill(work)
    buffers.rows[2].status, buffers.rows[2].error_layer = lib.COLIBRI_ENUMERIC, layer
    buffers.seq_status[1] = buffers.seq_status[2] = lib.COLIBRI_ENUMERIC
    good, bad, prefill = buffers.results(work)
    assert good.ok
    assert (bad.ok, bad.rows) == (False, ())
    assert bad.error == f"a NaN or infinity arose in {place} at position 12"
    assert prefill.error == "a NaN or infinity arose in a layer at one of the positions 20 to 24"
