"""Damping over given scores: exactly the reference's choices, and what holds whatever the policy."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from engine_c import Damping, EngineError, isa_available, isa_name, isa_select
from engine_c.damp import damp_scores
from tests.unit.engine_c.damping_reference import ANY_LOSS, Row, damp

Floats = npt.NDArray[np.float32]
FORMS = [("heat", "sequence"), ("heat", "batch"), ("capacity", "sequence"), ("capacity", "batch"), ("reuse", "batch")]
SHAPES = [(1, 1), (2, 1), (4, 2), (8, 2), (8, 8), (7, 3), (16, 4), (33, 5)]


def make_scores(rng: np.random.Generator, n: int, experts: int, fill: str) -> Floats:
    """Tokens that like the same experts, as real ones do; ties; scores a hair apart; huge ones."""
    liking = rng.normal(size=experts) * 1.5
    scores = rng.normal(size=(n, experts)) + liking
    if fill == "ties":
        scores = np.round(scores)
    elif fill == "equal":
        scores[:] = 0.25
    elif fill == "huge":
        scores *= 1e37
    elif fill == "hair":
        scores = 1 + scores * 1e-6
    return scores.astype(np.float32)


@st.composite
def dampings(draw: st.DrawFn, forms: Sequence[tuple[str, str]] = FORMS) -> Damping:
    kind, scope = draw(st.sampled_from(forms))
    return Damping(
        kind,  # type: ignore[arg-type]
        scope=scope,  # type: ignore[arg-type]
        threshold=draw(st.sampled_from([0, 1, 3])),
        growth=draw(st.sampled_from([1.0, 1.02, 1.25, 2.0, 1000.0])),
        decay=draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
        capacity_factor=draw(st.sampled_from([1.0, 1.25, 2.0])),
        margin=draw(st.sampled_from([0.0, 0.3, 1.0, 1e6])),
        max_rerouted=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Damping, Floats, int, list[int], bool, npt.NDArray[np.bool_] | None]:
    """A damping, scores, k, the tokens of each step, whether the scores are logits, pinned tokens."""
    damping = draw(dampings())
    experts, k = draw(st.sampled_from(SHAPES))
    steps = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    fill = draw(st.sampled_from(["normal", "ties", "equal", "huge", "hair"]))
    logits = draw(st.booleans())
    scores = make_scores(rng, sum(steps), experts, fill if logits or fill != "huge" else "normal")
    if draw(st.booleans()):
        scores[rng.integers(sum(steps)), rng.integers(experts)] = np.nan
    pinned = rng.random(sum(steps)) < 0.3 if damping.scope == "batch" and draw(st.booleans()) else None
    return damping, scores, k, steps, logits, pinned


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_choices_are_the_references(case: tuple[Damping, Floats, int, list[int], bool, npt.NDArray[np.bool_] | None]) -> None:
    damping, scores, k, steps, logits, pinned = case
    ids, changed = damp_scores(damping, scores, k=k, steps=steps, logits=logits, pinned=pinned)
    wanted, wanted_changed = damp(damping, scores, k=k, steps=steps, logits=logits, pinned=None if pinned is None else pinned.tolist())
    assert ids.tolist() == wanted
    assert changed.tolist() == wanted_changed


def own_choice(scores: Floats, k: int) -> list[list[int]]:
    return [Row(token, k, True, 0).own for token in scores]


def gaps(scores: Floats, own: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Given-up less taken scores, both descending: what any fair pairing must keep within the margin."""
    given_up = sorted((float(scores[e]) for e in own if e not in ids), reverse=True)
    taken = sorted((float(scores[e]) for e in ids if e not in own), reverse=True)
    return [a - b for a, b in zip(given_up, taken, strict=True)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_margin_share_and_undamped_tokens_hold(case: tuple[Damping, Floats, int, list[int], bool, npt.NDArray[np.bool_] | None]) -> None:
    damping, scores, k, steps, logits, pinned = case
    ids, changed = damp_scores(damping, scores, k=k, steps=steps, logits=logits, pinned=pinned)
    own = own_choice(scores, k)
    held = np.zeros(len(scores), bool) if pinned is None else pinned
    held = held | ~np.isfinite(scores).all(axis=1)
    for token, before, after, moved, fixed in zip(scores, own, ids.tolist(), changed, held, strict=True):
        assert len(set(after)) == k
        assert moved == (set(before) != set(after))
        assert not (fixed and after != before)
        if moved:
            assert max(gaps(token, before, after)) <= damping.margin * (1 + 1e-6)
            assert after == sorted(after, key=lambda e: (-token[e], e))
    ends = list(itertools.accumulate(steps)) if damping.scope == "batch" else range(1, len(scores) + 1)
    first = 0
    for end in ends:  # in scope sequence the share holds after every token
        assert changed[first:end].sum() <= damping.max_rerouted * (~held[first:end]).sum() + 1e-6
        first = end if damping.scope == "batch" else 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(dampings([form for form in FORMS if form[1] == "sequence"]), st.integers(0, 2**32), st.data())
def test_scope_sequence_does_not_depend_on_the_cut_into_steps(damping: Damping, seed: int, data: st.DataObject) -> None:
    scores = make_scores(np.random.default_rng(seed), 40, 8, "normal")
    steps: list[int] = []
    while sum(steps) < 40:
        steps.append(data.draw(st.integers(1, 40 - sum(steps))))
    whole, cut = damp_scores(damping, scores, k=2), damp_scores(damping, scores, k=2, steps=steps)
    assert np.array_equal(whole[0], cut[0])
    assert np.array_equal(whole[1], cut[1])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(SHAPES), st.sampled_from([1.0, 1.25, 1.5, 3.0]), st.sampled_from([0.5, 1.0, 1e6]))
def test_no_queue_passes_the_capacity_unless_margin_forbids(seed: int, shape: tuple[int, int], factor: float, margin: float) -> None:
    experts, k = shape
    scores = make_scores(np.random.default_rng(seed), 16, experts, "normal")
    ids, _ = damp_scores(Damping("capacity", scope="batch", capacity_factor=factor, margin=margin), scores, k=k)
    share = 16 * k / experts
    bound = max(int(np.ceil(share)), int(factor * share))
    queue = Counter(ids.ravel().tolist())
    full = [e for e, length in queue.items() if length > bound]
    room = [e for e in range(experts) if queue[e] < bound]
    if margin == 1e6 and k == 1:
        assert not full
    own = own_choice(scores, k)
    for token, before, after in zip(scores, own, ids.tolist(), strict=True):
        for a in set(full) & set(after) & set(before):
            assert not any(e not in after and e not in before and token[a] - token[e] <= margin for e in room)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(SHAPES), st.sampled_from([0.2, 1.0, 1e6]), st.booleans())
def test_reuse_never_adds_an_active_expert(seed: int, shape: tuple[int, int], margin: float, pin: bool) -> None:
    experts, k = shape
    rng = np.random.default_rng(seed)
    scores = make_scores(rng, 6, experts, "normal")
    pinned = rng.random(6) < 0.3 if pin else None
    ids, changed = damp_scores(Damping("reuse", margin=margin), scores, k=k, pinned=pinned)
    before, after = set(itertools.chain(*own_choice(scores, k))), set(ids.ravel().tolist())
    assert after <= before
    assert len(after) < len(before) or not changed.any()
    if margin == 1e6 and pinned is None and before != set(range(experts)):
        assert len(after) <= max(k, len(before))


@pytest.mark.parametrize("kind", ["heat", "capacity"])
def test_queues_get_even(kind: str) -> None:
    scores = make_scores(np.random.default_rng(4), 160, 8, "normal")
    damping = Damping(kind, scope="batch", growth=1.5, capacity_factor=1.0, margin=1e6)  # type: ignore[arg-type]

    def variance(ids: npt.NDArray[np.int32]) -> float:
        return float(np.mean([np.bincount(step.ravel(), minlength=8).var() for step in np.split(ids, 10)]))

    plain, _ = damp_scores(replace(damping, max_rerouted=0), scores, k=2, steps=[16] * 10)
    damped, _ = damp_scores(damping, scores, k=2, steps=[16] * 10)
    assert variance(damped) < 0.2 * variance(plain)


def test_an_expert_used_too_often_in_a_row_is_passed_over() -> None:
    """Every token likes expert 0 a little better than 1: after `threshold` uses the price of the next must make the difference."""
    scores = np.tile(np.array([1.0, 0.9, -9, -9], np.float32), (12, 1))
    damping = Damping("heat", scope="sequence", threshold=3, growth=2.0, decay=0.0, margin=0.5)
    ids, _ = damp_scores(damping, scores, k=1)
    assert ids.ravel().tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert damp_scores(replace(damping, margin=0.05), scores, k=1)[1].sum() == 0


@pytest.mark.parametrize("kind", ["heat", "capacity", "reuse"])
@pytest.mark.parametrize("fill", ["normal", "skewed", "same", "equal"])
def test_long_steps_take_no_longer_than_their_experts_would(kind: str, fill: str) -> None:
    """A long prompt whose tokens may all go anywhere, or are all the same: the greedy choice would look through queues for seconds."""
    rng = np.random.default_rng(11)
    liking = rng.normal(size=128) * {"normal": 0, "skewed": 2, "same": 1, "equal": 0}[fill]
    noise = rng.normal(size=(512, 128)) if fill in ("normal", "skewed") else 0
    scores = (np.zeros((512, 128)) + liking + noise).astype(np.float32)
    damping = Damping(kind, scope="batch", growth=1000, capacity_factor=1, margin=1e6, max_rerouted=0.9)  # type: ignore[arg-type]
    began = time.process_time()
    ids, changed = damp_scores(damping, scores, k=8)
    assert time.process_time() - began < 0.5
    assert changed.sum() <= 0.9 * 512
    if kind != "reuse":
        assert changed.any()
    before = np.argsort(-scores, axis=1, kind="stable")[:, :8]
    assert ((np.sort(ids, axis=1) != np.sort(before, axis=1)).any(axis=1) == changed).all()
    assert all(len(set(row)) == 8 for row in ids.tolist())


def test_every_instruction_set_chooses_the_same() -> None:
    chosen = isa_name()
    scores = make_scores(np.random.default_rng(9), 64, 16, "normal")
    try:
        for kind, scope in FORMS:
            damping = Damping(kind, scope=scope, growth=1.3, margin=2)  # type: ignore[arg-type]
            found = []
            for isa in isa_available():
                isa_select(isa)
                found.append(damp_scores(damping, scores, k=4, steps=[16] * 4)[0].tolist())
            assert all(one == found[0] for one in found)
    finally:
        isa_select(chosen)


FIELDS = [
    ("kind", "cold"), ("scope", "world"), ("threshold", -1), ("growth", 0.5), ("growth", float("nan")), ("decay", 1.5), ("decay", -0.1),
    ("capacity_factor", 0.9), ("margin", -1), ("margin", float("inf")), ("max_rerouted", 1.01), ("max_rerouted", -0.5),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(Damping("heat"), **{field: value})  # type: ignore[arg-type]


def test_reuse_in_scope_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="scope must be 'batch' for kind 'reuse'"):
        Damping("reuse", scope="sequence")


def test_bad_shapes_are_refused() -> None:
    scores = np.zeros((4, 8), np.float32)
    with pytest.raises(EngineError, match="top 9 of 8"):
        damp_scores(Damping("heat"), scores, k=9)
    with pytest.raises(EngineError, match="pinned"):
        damp_scores(Damping("heat", scope="sequence"), scores, k=2, pinned=np.zeros(4, bool))
    with pytest.raises(ValueError, match="4 tokens"):
        damp_scores(Damping("heat"), scores, k=2, steps=[3])


def test_a_price_above_every_loss_is_above_every_loss() -> None:
    tokens = make_scores(np.random.default_rng(1), 50, 8, "normal")
    assert max(float(Row(token, 2, True, 0).values.max()) for token in tokens) <= 1 < ANY_LOSS
