"""Telemetry beside what traced routes say; margins of wanted rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from engine_c import RUN_BUCKETS, Damping, EngineError, Model, SeqWork, Session, SessionOptions, Telemetry
from ops.random_model import SHAPES, make_model

SEQS, STEPS = 6, 25
OPTIONS = SessionOptions(max_rows=64, max_seqs=SEQS, max_logit_rows=SEQS, kv_blocks=SEQS * 8, trace_routes=1, max_slots=SEQS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    made = tmp_path_factory.mktemp("telemetry") / "random.colibri"
    make_model(made, next(iter(SHAPES.values())), quant="f32")
    with Model.open(made) as opened:
        yield opened


def one_step(step: int, damping: Damping | None, *, routes: bool = False) -> list[SeqWork]:
    """Prompts of 1 to 6 tokens first, then a token each; the last sequence has no slot, the one before it no damping."""
    work = []
    for i in range(SEQS):
        start, count = (0, i + 1) if step == 0 else (i + step, 1)
        tokens = [(7 * i + 13 * (start + j)) % 200 for j in range(count)]
        blocks = range(i * 8, i * 8 + (start + count + 15) // 16)
        slot, policy = (i, damping) if i < SEQS - 1 else (-1, None)
        work.append(SeqWork(tokens, start, blocks, 1, slot=slot, damping=None if i == SEQS - 2 else policy, routes=routes))
    return work


POLICIES = [None, Damping("heat", scope="batch", growth=2), Damping("heat", scope="sequence", threshold=0, growth=3)]


@pytest.mark.parametrize("damping", POLICIES)
def test_telemetry_is_what_traced_routes_add_up_to(damping: Damping | None, model: Model) -> None:
    info = model.info
    queues: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    firsts: list[list[list[int]]] = [[[] for _ in range(SEQS - 1)] for _ in range(info.layers)]
    rerouted = 0
    with Session(model, OPTIONS) as session:
        for step in range(STEPS):
            work = one_step(step, damping)
            results, _ = session.step(work)
            rerouted += sum(result.rerouted for result in results)
            assert results[-1].rerouted == results[-2].rerouted == 0
            experts, _ = session.routes(sum(len(w.tokens) for w in work))
            queues.append(np.stack([np.bincount(layer.ravel(), minlength=info.experts) for layer in experts]))
            row = 0
            for i, w in enumerate(work):
                for layer in range(info.layers if i < SEQS - 1 else 0):
                    firsts[layer][i] += experts[layer, row : row + len(w.tokens), 0].tolist()
                row += len(w.tokens)
        told = session.telemetry()
    check_queues(told, np.stack(queues))
    assert int(told.rerouted.sum()) == rerouted
    assert (rerouted > 0) == (damping is not None)
    for layer in range(info.layers):
        assert told.repeats[layer] == sum(a == b for line in firsts[layer] for a, b in pairwise(line))
        buckets = Counter(min(length.bit_length() - 1, RUN_BUCKETS - 1) for line in firsts[layer] for length in ended_runs(line))
        assert told.runs[layer].tolist() == [buckets[b] for b in range(RUN_BUCKETS)]


def check_queues(told: Telemetry, queues: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
    """queues [steps, layers, experts]."""
    assert np.array_equal(told.tokens, queues.sum(axis=0))
    assert np.array_equal(told.active, (queues > 0).sum(axis=0))
    assert np.array_equal(told.active_experts, (queues > 0).sum(axis=(0, 2)))
    assert np.array_equal(told.queue_squares, (queues**2).sum(axis=(0, 2)))
    longest = queues.max(axis=2)
    assert np.array_equal(told.queue_longest, longest.sum(axis=0))
    assert np.array_equal(told.longest_squares, (longest**2).sum(axis=0))
    assert np.array_equal(told.queue_max, longest.max(axis=0))
    assert told.steps.tolist() == [STEPS] * len(told.steps)


def ended_runs(line: list[int]) -> list[int]:
    """Lengths of the runs of equal values but for the last, which goes on."""
    ends = [i for i in range(1, len(line)) if line[i] != line[i - 1]]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def test_routes_come_to_those_who_want_them(model: Model) -> None:
    with Session(model, OPTIONS) as session:
        results, _ = session.step(one_step(0, None, routes=True))
        experts, weights = session.routes(sum(range(1, SEQS + 1)))
        row = 0
        for i, result in enumerate(results):
            routes = result.routes
            assert routes is not None
            assert np.array_equal(routes.experts, experts[:, row : row + i + 1])
            assert np.array_equal(routes.weights, weights[:, row : row + i + 1])
            assert routes.margins.shape == (model.info.router_layers, i + 1)
            assert (routes.margins >= 0).all()
            row += i + 1
        results, _ = session.step(one_step(1, None))
        assert all(result.routes is None for result in results)


def test_routes_and_slots_that_a_session_has_not_are_refused(model: Model) -> None:
    with Session(model, SessionOptions(max_rows=8, max_seqs=1, max_logit_rows=1, kv_blocks=1)) as session:
        with pytest.raises(EngineError, match="margins"):
            session.step([SeqWork([1], 0, [0], 1, routes=True)])
        with pytest.raises(EngineError, match="slot 0"):
            session.step([SeqWork([1], 0, [0], 1, slot=0)])
