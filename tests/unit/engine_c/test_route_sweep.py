"""colibri_route_logits against float64 formulas: a sweep over experts, k, rows and every option, on every instruction set of this CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_c import Router
from tests.golden import router_reference as reference
from tests.golden.router_reference import Array, Facts, Ids
from tests.unit.engine_c.routing import F32, f32, isas_in_turn, route_on

EXPERTS = (1, 2, 3, 5, 7, 8, 16, 60, 64, 128, 256)
ROWS = (1, 7, 16, 33)
GAP = 1e-6  # of compared values: ids must agree where it is larger
WEIGHT = 1e-6  # of weights

SCORES = ("softmax_all", "sigmoid", "sqrt_softplus", "logits")
WEIGHTS: tuple[Facts, ...] = (
    {"weight": "softmax_chosen"}, {"weight": "unbiased_score"}, {"weight": "sigmoid_chosen"},
    {"weight": "sparsemixer", "jitter_eps": 0.01}, {"weight": "sparsemixer", "jitter_eps": 0.2},
)  # fmt: skip
RENORMS: tuple[Facts, ...] = (
    {}, {"renorm": "sum"}, {"renorm": "sum", "renorm_eps": 1e-20}, {"renorm": "sum", "renorm_eps": 1e-6},
    {"renorm": "sum", "renorm_eps": 0.75, "renorm_way": "clamp"},
)  # fmt: skip


@dataclass
class Tally:
    """How many rows were held against the reference, and how many were too near a tie or threshold to be."""

    cases: int = 0
    compared: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Chosen:
    """A way of selecting, its inputs, and whom the reference selects with one k."""

    router: Facts
    z: F32
    exact: Array
    bias: F32 | None
    expert_scale: F32
    ids: Ids
    clear: NDArray[np.bool_]  # rows whose choice is certain


def group_options(experts: int, rng: np.random.Generator) -> Iterator[Facts]:
    """None, then each metric and mask with a count of groups that divides the experts."""
    yield {}
    for metric, mask in itertools.product(("max", "sum_top2"), ("zero", "minus_inf")):
        counts = [n for n in range(2, experts + 1) if experts % n == 0 and (metric == "max" or experts // n >= 2)]
        if counts:
            n_group = int(rng.choice(counts))
            topk_group = int(rng.integers(1, min(n_group, 64) + 1))
            yield {"n_group": n_group, "topk_group": topk_group, "group_metric": metric, "group_mask": mask}


def choices(experts: int, router: Facts, biased: bool, rng: np.random.Generator) -> Iterator[Chosen]:
    """With every k."""
    z, expert_scale = f32(3 * rng.standard_normal((max(ROWS), experts))), f32(1 + 0.2 * rng.standard_normal(experts))
    bias = f32(0.3 * rng.standard_normal(experts)) if biased else None
    exact = z.astype(np.float64)
    compared, group_gap = reference.choice(router, exact, None if bias is None else bias.astype(np.float64))
    order = reference.order(compared)
    ranked = np.concatenate([np.take_along_axis(compared, order, axis=-1), np.full((len(z), 1), -np.inf)], axis=1)
    with np.errstate(invalid="ignore"):
        gaps = ranked[:, :-1] - ranked[:, 1:]
    most = experts // router["n_group"] * router["topk_group"] if router.get("n_group") else experts
    for k in sorted({*range(1, 11), experts}):
        if k <= min(most, 64):
            clear = (gaps[:, :k].min(axis=1) > GAP) & (group_gap > GAP)
            yield Chosen({**router, "k": k}, z, exact, bias, expert_scale, order[:, :k], clear)


def check_weighing(tally: Tally, chosen: Chosen, weighing: Facts) -> None:
    """One way of weighing, with every renormalisation; rows, scales and all but the best instruction set take turns."""
    facts = {**chosen.router, **weighing}
    base = reference.unscaled(facts, chosen.exact, chosen.ids)
    sound = chosen.clear
    if weighing["weight"] == "sparsemixer":
        sound = sound & (reference.sparsemixer(chosen.exact, chosen.ids, weighing["jitter_eps"])[1] > GAP)
    for renorm in RENORMS:
        rows, scale = ROWS[tally.cases % len(ROWS)], 2.5 if tally.cases % 2 else 1.0
        expert_scale = chosen.expert_scale if tally.cases % 3 == 0 else None
        router = Router.from_json({**facts, **renorm, "scale": scale}, experts=chosen.z.shape[1])
        got = route_on(isas_in_turn(tally.cases), router, chosen.z[:rows], select_bias=chosen.bias, expert_scale=expert_scale)
        assert not got.bad.any(), router
        assert np.array_equal(got.ids[chosen.clear[:rows]], chosen.ids[:rows][chosen.clear[:rows]]), router
        want = reference.renormalised(renorm, base[:rows]) * scale * (1 if expert_scale is None else expert_scale[chosen.ids[:rows]])
        wrong = np.abs(got.weights - want) > WEIGHT * np.maximum(1, np.abs(want)) * condition(renorm, base[:rows])
        assert not wrong[sound[:rows]].any(), (router, got.weights, want)
        tally.cases += 1
        tally.compared += int(np.count_nonzero(sound[:rows]))
        tally.skipped += rows - int(np.count_nonzero(sound[:rows]))


def condition(renorm: Facts, base: Array) -> Array:
    """How much a sum that cancels out (raw logits have both signs) magnifies rounding; 1 for all other weights."""
    if not renorm:
        return np.ones((len(base), 1))
    total = base.sum(axis=-1, keepdims=True) + renorm.get("renorm_eps", 0.0)
    return np.asarray(np.maximum(1, np.abs(base).sum(axis=-1, keepdims=True) / np.abs(total)))


@pytest.mark.usefixtures("each_isa")
@pytest.mark.parametrize("experts", EXPERTS)
def test_every_option_equals_the_formulas(experts: int) -> None:
    rng, tally = np.random.default_rng(experts), Tally()
    for score, biased in itertools.product(SCORES, (False, True)):
        for groups in group_options(experts, rng):
            for chosen in choices(experts, {"score": score, **groups}, biased, rng):
                for weighing in WEIGHTS:
                    check_weighing(tally, chosen, weighing)
    assert tally.compared > 20 * tally.skipped, tally
