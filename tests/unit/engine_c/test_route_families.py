"""The families' routers, each formula as its reference implementation has it, and what logits do that are no ordinary numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine_c import EngineError, Router, isa_available, route_logits
from tests.golden.router_reference import Array, Ids
from tests.unit.engine_c.routing import F32, f32, route_on

pytestmark = pytest.mark.usefixtures("each_isa")

Found = tuple[Ids, Array]


def top(x: Array, k: int) -> Ids:
    return np.argsort(-x, axis=-1, kind="stable")[:, :k].astype(np.int32)


def at(x: Array, ids: Ids) -> Array:
    return np.take_along_axis(x, ids, axis=-1)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def share(w: Array, eps: float = 0.0) -> Array:
    return np.asarray(w / (w.sum(axis=-1, keepdims=True) + eps))


def mixtral(z: Array, b: Array, s: Array) -> Found:
    ids = top(softmax(z), 2)
    return ids, share(at(softmax(z), ids))


def qwen_norm(z: Array, b: Array, s: Array) -> Found:
    ids = top(softmax(z), 8)
    return ids, share(at(softmax(z), ids))


def qwen_plain(z: Array, b: Array, s: Array) -> Found:
    ids = top(softmax(z), 8)
    return ids, at(softmax(z), ids)


def gpt_oss(z: Array, b: Array, s: Array) -> Found:
    ids = top(z, 4)
    return ids, softmax(at(z, ids))


def llama4(z: Array, b: Array, s: Array) -> Found:
    ids = top(z, 1)
    return ids, sigmoid(at(z, ids))


def deepseek_v2(z: Array, b: Array, s: Array) -> Found:
    """group_limited_greedy: 8 groups, the best of each by its largest, 3 kept, others' probabilities set to 0; times 16."""
    p = softmax(z)
    kept = top(p.reshape(len(z), 8, -1).max(axis=-1), 3)
    mask = np.zeros((len(z), 8))
    np.put_along_axis(mask, kept, 1, axis=-1)
    p = np.where(np.repeat(mask, z.shape[1] // 8, axis=-1) > 0, p, 0)
    ids = top(p, 6)
    return ids, at(p, ids) * 16


def deepseek_v3(z: Array, b: Array, s: Array) -> Found:
    """The bias chooses and does not weigh; groups by the sum of their two best; others -inf."""
    p = sigmoid(z)
    choice = p + b
    groups = np.sort(choice.reshape(len(z), 8, -1), axis=-1)[..., -2:].sum(axis=-1)
    mask = np.zeros((len(z), 8))
    np.put_along_axis(mask, top(groups, 4), 1, axis=-1)
    ids = top(np.where(np.repeat(mask, z.shape[1] // 8, axis=-1) > 0, choice, -np.inf), 8)
    return ids, share(at(p, ids), 1e-20) * 2.5


def mistral4(z: Array, b: Array, s: Array) -> Found:
    p = softmax(z)
    groups = np.sort(p.reshape(len(z), 4, -1), axis=-1)[..., -2:].sum(axis=-1)
    mask = np.zeros((len(z), 4))
    np.put_along_axis(mask, top(groups, 2), 1, axis=-1)
    ids = top(p * np.repeat(mask, z.shape[1] // 4, axis=-1), 4)
    return ids, share(at(p, ids), 1e-20)


def minimax_m2(z: Array, b: Array, s: Array) -> Found:
    ids = top(sigmoid(z) + b, 8)
    return ids, share(at(sigmoid(z), ids))


def ernie(z: Array, b: Array, s: Array) -> Found:
    ids = top(softmax(z) + b, 6)
    w = at(softmax(z), ids)
    return ids, w / np.maximum(w.sum(axis=-1, keepdims=True), 1e-12)


def lfm2(z: Array, b: Array, s: Array) -> Found:
    ids = top(sigmoid(z) + b, 4)
    return ids, share(at(sigmoid(z), ids), 1e-6) * 1.5


def gemma4(z: Array, b: Array, s: Array) -> Found:
    ids = top(softmax(z), 8)
    return ids, share(at(softmax(z), ids)) * s[ids]


def deepseek_v4(z: Array, b: Array, s: Array) -> Found:
    score = np.sqrt(np.log1p(np.exp(z)))
    ids = top(score + b, 6)
    return ids, share(at(score, ids)) * 1.5


def phimoe(z: Array, b: Array, s: Array) -> Found:
    """Sparsemixer at inference, eps 0.01."""
    rows = np.arange(len(z))

    def one(masked: Array) -> tuple[Array, Array]:
        most, best = masked.max(axis=-1, keepdims=True), masked.argmax(axis=-1)
        far = (most - z) / np.maximum(np.abs(z), most) > 0.02
        return best, softmax(np.where(far, -np.inf, masked))[rows, best]

    first, w1 = one(z)
    left = z.copy()
    left[rows, first] = -np.inf
    second, w2 = one(left)
    return np.stack([first, second], axis=1).astype(np.int32), np.stack([w1, w2], axis=1)


GROUPS_V3: Mapping[str, Any] = {"n_group": 8, "topk_group": 4, "group_metric": "sum_top2", "group_mask": "minus_inf"}
SIGMOID: Mapping[str, Any] = {"score": "sigmoid", "weight": "unbiased_score", "renorm": "sum"}
FAMILIES: Mapping[str, tuple[Callable[[Array, Array, Array], Found], Router, bool, bool]] = {
    "mixtral": (mixtral, Router(experts=8, k=2), False, False),
    "qwen3, norm_topk_prob true": (qwen_norm, Router(experts=128, k=8), False, False),
    "qwen3 as it is written": (qwen_norm, Router(experts=128, k=8, weight="unbiased_score", renorm="sum"), False, False),
    "qwen2 and olmoe, norm_topk_prob false": (qwen_plain, Router(experts=60, k=8, weight="unbiased_score"), False, False),
    "gpt-oss": (gpt_oss, Router(experts=32, k=4, score="logits"), False, False),
    "llama 4": (llama4, Router(experts=16, k=1, score="logits", weight="sigmoid_chosen", apply_at="input"), False, False),
    "deepseek v2": (
        deepseek_v2,
        Router(experts=160, k=6, weight="unbiased_score", n_group=8, topk_group=3, group_metric="max", group_mask="zero", scale=16),
        False, False,
    ),
    "deepseek v3": (deepseek_v3, Router(experts=256, k=8, **SIGMOID, **GROUPS_V3, renorm_eps=1e-20, scale=2.5), True, False),
    "mistral 4": (
        mistral4,
        Router(experts=128, k=4, weight="unbiased_score", n_group=4, topk_group=2, group_metric="sum_top2", renorm="sum", renorm_eps=1e-20),
        False, False,
    ),
    "minimax m2": (minimax_m2, Router(experts=256, k=8, **SIGMOID), True, False),
    "ernie 4.5": (ernie, Router(experts=64, k=6, weight="unbiased_score", renorm="sum", renorm_eps=1e-12, renorm_way="clamp"), True, False),
    "lfm2": (lfm2, Router(experts=32, k=4, **SIGMOID, renorm_eps=1e-6, scale=1.5), True, False),
    "gemma 4": (gemma4, Router(experts=128, k=8, weight="unbiased_score", renorm="sum", input="residual"), False, True),
    "deepseek v4": (
        deepseek_v4, Router(experts=256, k=6, score="sqrt_softplus", weight="unbiased_score", renorm="sum", scale=1.5), True, False,
    ),
    "phimoe": (phimoe, Router(experts=16, k=2, score="logits", weight="sparsemixer", jitter_eps=0.01), False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    formula, router, biased, scaled = FAMILIES[name]
    rng = np.random.default_rng(len(name))
    z = f32(2 * rng.standard_normal((67, router.experts)))
    bias, scale = f32(0.2 * rng.standard_normal(router.experts)), f32(rng.uniform(0.5, 1.5, router.experts))
    ids, weights = formula(*(np.asarray(x, np.float64) for x in (z, bias, scale)))
    got = route_on(isa_available(), router, z, select_bias=bias if biased else None, expert_scale=scale if scaled else None)
    assert not got.bad.any()
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=2e-6, atol=1e-7)


# ---------------------------------------------------------------- logits that are no ordinary numbers

ROUTERS = [router for _, router, _, _ in FAMILIES.values()]


def of_small(router: Router) -> Router:
    """The same for 16 experts in groups of four or two."""
    groups = {8: 4, 4: 4}.get(router.n_group, 1)
    return replace(router, experts=16, k=min(router.k, 2), n_group=groups, topk_group=min(groups, 2))


@pytest.mark.parametrize("router", ROUTERS, ids=list(FAMILIES))
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_with_what_is_no_number_is_named_and_disturbs_no_other(router: Router, poison: float) -> None:
    z = f32(np.random.default_rng(1).standard_normal((40, router.experts)))
    clean = route_on(isa_available(), router, z)
    rows, columns = [3, 20, 39], [0, router.experts // 2, router.experts - 1]
    z[rows, columns] = poison
    got = route_on(isa_available(), router, z)
    assert np.flatnonzero(got.bad).tolist() == rows
    assert (got.ids[rows] == np.arange(router.k)).all()
    assert not got.weights[rows].any()
    others = ~got.bad
    assert np.array_equal(got.ids[others], clean.ids[others])
    assert np.array_equal(got.weights[others], clean.weights[others])


@pytest.mark.parametrize("router", ROUTERS, ids=list(FAMILIES))
def test_equal_logits_give_the_lowest_experts_equal_weights(router: Router) -> None:
    small = of_small(router)
    for value in (0.0, -0.0, 7.25, -7.25):
        got = route_on(isa_available(), small, np.full((17, 16), value, np.float32))
        assert not got.bad.any()
        assert (got.ids == np.arange(small.k)).all()
        if small.weight != "sparsemixer":  # there the second is weighed without the first
            assert np.ptp(got.weights) == 0


@pytest.mark.parametrize("router", ROUTERS, ids=list(FAMILIES))
def test_huge_and_denormal_logits_are_defined(router: Router) -> None:
    small = of_small(router)
    rng = np.random.default_rng(2)
    numbers = rng.standard_normal((33, 16))
    largest = np.sign(numbers) * np.finfo(np.float32).max
    for z in map(f32, (3e37 * numbers, 1e-42 * numbers, 1e3 * numbers, 1e3 * (numbers - 5), largest)):
        got = route_on(isa_available(), small, z)
        assert not got.bad.any()
        assert np.isfinite(got.weights).all()
        assert (got.weights >= 0).all()
        assert all(len(set(row)) == small.k and min(row) >= 0 and max(row) < 16 for row in got.ids.tolist())
        if small.n_group == 1:
            assert np.array_equal(got.ids, top(z.astype(np.float64), small.k)), "logits tell apart what saturated scores do not"
        if small.weight == "unbiased_score" and small.renorm == "sum" and small.renorm_eps == 0:
            np.testing.assert_allclose(got.weights.sum(axis=-1), small.scale, rtol=1e-6)


def test_scores_that_underflow_are_renormalised_by_their_logits() -> None:
    z = f32([[-200, -201, -203, -400], [-95, -94, -96, -99]])
    for score, slope in (("sigmoid", 1.0), ("sqrt_softplus", 0.5)):
        router = Router(experts=4, k=3, score=score, weight="unbiased_score", renorm="sum")  # type: ignore[arg-type]
        got = route_on(isa_available(), router, z)
        np.testing.assert_allclose(got.weights, softmax(slope * at(z.astype(np.float64), got.ids)), rtol=1e-5)


def test_an_overflowing_weight_is_named() -> None:
    router = Router(experts=4, k=2, score="logits", weight="unbiased_score", renorm="sum")
    got = route_on(isa_available(), router, f32([[3e38, 3e38, 0, 0], [2, 1, 0, 0]]), expert_scale=f32([1, 1, 1, 1]))
    assert got.weights[1].tolist() == pytest.approx([2 / 3, 1 / 3])
    got = route_on(isa_available(), Router(experts=4, k=1), f32([[5, 1, 1, 1], [1, 5, 1, 1]]), expert_scale=f32([np.inf, 2, 2, 2]))
    assert got.bad.tolist() == [True, False]
    assert got.weights.tolist() == [[0], [2]]
    got = route_on(isa_available(), Router(experts=4, k=1, score="sigmoid"), f32([[5, 1, 1, 1]]), select_bias=f32([0, np.nan, 0, 0]))
    assert got.bad.tolist() == [True]


@pytest.mark.parametrize("router", ROUTERS, ids=list(FAMILIES))
def test_a_row_alone_has_the_bits_it_has_among_others(router: Router) -> None:
    rng = np.random.default_rng(3)
    z, bias = f32(rng.standard_normal((35, router.experts))), f32(0.1 * rng.standard_normal(router.experts))
    whole = route_on(isa_available(), router, z, select_bias=bias)
    for first, count in ((0, 1), (5, 3), (7, 16), (2, 33)):
        part = route_on(isa_available(), router, z[first : first + count], select_bias=bias)
        assert np.array_equal(part.ids, whole.ids[first : first + count])
        assert np.array_equal(part.weights, whole.weights[first : first + count])


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("router", "sentence"),
    [
        (Router(experts=0, k=1), "router.experts is 0"),
        (Router(experts=2000, k=1), "router.experts is 2000"),
        (Router(experts=8, k=0), "router.k is 0"),
        (Router(experts=8, k=9), "router.k is 9 but there are 8 experts"),
        (Router(experts=100, k=65), "router.k is 65"),
        (Router(experts=8, k=2, n_group=3, topk_group=2), "router.n_group is 3, which does not divide the 8 experts"),
        (Router(experts=8, k=2, n_group=4, topk_group=0), "router.topk_group is 0, outside 1..4"),
        (Router(experts=8, k=4, n_group=4, topk_group=1), "router.k is 4, but router.topk_group keeps only 1 groups of 2"),
        (Router(experts=8, k=1, n_group=8, topk_group=2, group_metric="sum_top2"), "router.group_metric is sum_top2, but a group has one"),
        (Router(experts=8, k=2, topk_group=2), "router.topk_group is 2 though there are no groups"),
        (Router(experts=8, k=2, renorm_eps=1e-3), "router.renorm_eps is 0.001 though router.renorm is none"),
        (Router(experts=8, k=2, jitter_eps=0.01), "router.jitter_eps is 0.01 though router.weight is not sparsemixer"),
        (Router(experts=8, k=2, renorm="sum", renorm_eps=-1), "router.renorm_eps is -1"),
        (Router(experts=8, k=2, scale=0), "router.scale is 0"),
        (Router(experts=8, k=2, scale=float("nan")), "router.scale is nan"),
    ],
)
def test_a_descriptor_that_makes_no_sense_is_refused_by_field(router: Router, sentence: str) -> None:
    with pytest.raises(EngineError, match=r"router\.") as refusal:
        route_logits(router, np.zeros((1, router.experts), np.float32))
    assert refusal.value.name == "EINVAL"
    assert sentence in str(refusal.value)


def test_values_and_shapes_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"router.score is 'tanh'; the engine runs: softmax_all, sigmoid"):
        Router(experts=8, k=2, score="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"router.groups is set"):
        Router.from_json({"k": 2, "groups": 3}, experts=8)
    assert Router.from_json({"k": 2, "groups": None, "sel_bias": False}, experts=8) == Router(experts=8, k=2)
    with pytest.raises(ValueError, match=r"logits have shape \(8,\)"):
        route_logits(Router(experts=8, k=2), np.zeros(8))
    with pytest.raises(ValueError, match=r"select_bias has shape \(7,\)"):
        route_logits(Router(experts=8, k=2), np.zeros((1, 8)), select_bias=np.zeros(7))


def test_no_rows() -> None:
    got = route_logits(Router(experts=8, k=2), np.zeros((0, 8), np.float32))
    assert got.ids.shape == (0, 2)
    assert got.weights.shape == (0, 2)
    assert got.bad.shape == (0,)


def test_the_input_is_not_written_to() -> None:
    z: F32 = f32(np.random.default_rng(4).standard_normal((20, 64)))
    before = z.copy()
    route_logits(Router(experts=64, k=6, **SIGMOID), z, select_bias=np.ones(64))
    assert np.array_equal(z, before)
