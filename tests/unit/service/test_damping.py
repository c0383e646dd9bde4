"""Damping in words: what is understood, what is refused, and that the refusal names the thing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine_c import Damping
from engine_c.damp import damp_scores
from service.damping import NUMBERS, RECOMMENDED, DampingError, describe_damping, make_damping, parse_damping, used_numbers


@pytest.mark.parametrize(
    ("text", "scope", "expected"),
    [
        ("off", "", None),
        ("heat", "", Damping("heat", scope="sequence", growth=1.05)),
        ("heat", "batch", Damping("heat", scope="batch", growth=1.15)),
        (
            "capacity,capacity_factor=1.5,decay=0.9,margin=0.25",
            "",
            Damping("capacity", scope="sequence", capacity_factor=1.5, decay=0.9, margin=0.25),
        ),
        (
            "heat, threshold=5, growth=3, decay=0, max_rerouted=0.1",
            "",
            Damping("heat", scope="sequence", threshold=5, growth=3.0, decay=0.0, max_rerouted=0.1),
        ),
        ("reuse", "", Damping("reuse", scope="batch", margin=0.5)),
        ("reuse", "batch", Damping("reuse", scope="batch", margin=0.5)),
    ],
)
def test_words_are_understood(text: str, scope: str, expected: Damping | None) -> None:
    assert parse_damping(text, scope=scope) == expected


@pytest.mark.parametrize(
    ("text", "scope", "name", "said"),
    [
        ("", "", "damping", "off, heat, capacity, reuse"),
        ("warm", "", "damping", "'warm'"),
        ("heat", "world", "scope", "'world'"),
        ("reuse", "sequence", "scope", "batch alone"),
        ("off,margin=1", "", "damping", "no numbers"),
        ("off", "batch", "damping", "no scope"),
        ("heat,", "", "damping", "no setting ''"),
        ("heat,warmth=1", "", "damping", "margin="),
        ("heat,margin", "", "damping", "'margin'"),
        ("heat,margin=wide", "", "margin", "a number"),
        ("heat,threshold=2.5", "", "threshold", "a whole number"),
    ],
)
def test_what_is_not_understood_is_named(text: str, scope: str, name: str, said: str) -> None:
    with pytest.raises(DampingError) as caught:
        parse_damping(text, scope=scope)
    assert caught.value.name == name
    assert said in caught.value.sentence
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize("kind", ["heat", "capacity", "reuse"])
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("threshold", -1),
        ("growth", 0.5),
        ("decay", -0.1),
        ("decay", 1.5),
        ("capacity_factor", 0.9),
        ("margin", -0.01),
        ("max_rerouted", -0.1),
        ("max_rerouted", 1.01),
        *((name, float("nan")) for name in NUMBERS if name != "threshold"),
        *((name, float("inf")) for name in NUMBERS if name != "threshold"),
    ],
)
def test_a_number_out_of_range_is_named_whatever_the_kind(kind: str, name: str, bad: float) -> None:
    with pytest.raises(DampingError) as caught:
        make_damping(kind, numbers={name: bad})
    assert caught.value.name == name
    assert f"{bad}" in caught.value.sentence


def test_the_ends_of_the_ranges_are_taken() -> None:
    low = {"threshold": 0, "growth": 1.0, "decay": 0.0, "capacity_factor": 1.0, "margin": 0.0, "max_rerouted": 0.0}
    high = {"threshold": 1_000_000, "growth": 1000.0, "decay": 1.0, "capacity_factor": 1e6, "margin": 1e6, "max_rerouted": 1.0}
    for numbers in (low, high):
        damping = make_damping("heat", numbers=numbers)
        assert damping is not None
        assert {name: getattr(damping, name) for name in NUMBERS} == numbers


def test_recommended_numbers_are_taken_where_none_are_given() -> None:
    for (kind, scope), numbers in RECOMMENDED.items():
        damping = make_damping(kind, scope=scope, numbers={})
        assert damping is not None
        assert {name: getattr(damping, name) for name in numbers} == numbers
        assert make_damping(kind, scope=scope, numbers={"decay": 0.125}) == replace(damping, decay=0.125)


def test_a_description_has_the_numbers_its_kind_uses() -> None:
    assert describe_damping(None) == "off"
    assert describe_damping(Damping("heat", scope="batch", threshold=4, growth=2.0, decay=0.5, margin=0.25, max_rerouted=0.5)) == (
        "heat, scope batch, growth 2, margin 0.25, max_rerouted 0.5"
    )
    assert "capacity_factor 1.5" in describe_damping(Damping("capacity", capacity_factor=1.5))
    assert "threshold" not in describe_damping(Damping("reuse", scope="batch"))


@pytest.mark.parametrize(("kind", "scope"), [*RECOMMENDED, ("capacity", "batch")])
def test_numbers_that_are_not_used_change_nothing_and_are_refused_in_words(kind: str, scope: str) -> None:
    damping = make_damping(kind, scope=scope, numbers={"margin": 100.0, "capacity_factor": 1.25})
    assert damping is not None
    scores = np.random.default_rng(1).normal(size=(48, 8)).astype(np.float32)
    routes = damp_scores(damping, scores, k=2)
    assert routes[1].any()
    others: dict[str, int | float] = {"threshold": 17, "growth": 40.0, "decay": 0.25, "capacity_factor": 2.5}
    for name, number in others.items():
        again = damp_scores(replace(damping, **{name: number}), scores, k=2)  # type: ignore[arg-type]
        same = all(np.array_equal(one, other) for one, other in zip(routes, again, strict=True))
        assert same is (name not in used_numbers(damping)), name
        if same:
            with pytest.raises(DampingError, match="without effect"):
                parse_damping(f"{kind},{name}={number}", scope=scope)
