"""What Route tells of, and how long a text may be for its answer to stay below what clients take."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from engine_c import GREEDY, Routes
from engine_c.structs import ModelInfo
from service.artifact import Artifact, Generation
from service.experts import ANSWER_BYTES, check_length, pick_layers, read_layers, route_response
from service.faults import InvalidField
from service.params import Bounds
from service.request import Request
from service.served import Prompt, ServedModel

K = 8
INFO = ModelInfo(**{field.name: 1 for field in fields(ModelInfo)} | {"top_k": K, "experts": 60, "router_layers": 47})  # type: ignore[arg-type]
CONTEXT = 1 << 17


def model(*routed: int) -> ServedModel:
    return ServedModel("m", Artifact(Path("m"), "m", "f32", routed_layers=routed), INFO, Bounds(1000, CONTEXT, 1, Generation()))


def answer(served: ServedModel, tokens: int, layers: tuple[int, ...]) -> bytes:
    """A whole answer of the longest kind."""
    shape = len(layers), tokens, K
    chunk = Routes(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape[:2], np.float32))
    request = Request("r", (999,) * tokens, GREEDY, trace=True)
    request.rerouted = request.routed = 1 << 60
    request.started = request.first_token = request.last_token = 1e9
    named = replace(served, name="n" * 128)
    return route_response(request, [chunk], layers=layers, model=named, now=2e9).SerializeToString()


def test_layers_are_all_that_have_a_router_or_those_asked_for() -> None:
    assert read_layers([], model(1, 2, 5)) == (1, 2, 5)
    assert read_layers([5, 1], model(1, 2, 5)) == (5, 1)


@pytest.mark.parametrize(
    ("wanted", "field"), [([0], "layers[0]"), ([1, 3], "layers[1]"), ([1, 2, 1], "layers[2]"), ([2**32 - 1], "layers[0]")]
)
def test_a_layer_without_router_or_named_twice_is_refused(wanted: list[int], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read_layers(wanted, model(1, 2, 5))
    assert caught.value.field == field
    assert wanted != [0] or "those with one are 1-2, 5" in caught.value.sentence


def test_a_dense_model_is_told_to_be_one() -> None:
    with pytest.raises(InvalidField, match="no router: it is dense") as caught:
        read_layers([], model())
    assert caught.value.field == "model"


@pytest.mark.parametrize("layers", [(0,), tuple(range(47))])
def test_the_longest_text_that_is_taken_has_an_answer_just_below_the_bound(layers: tuple[int, ...]) -> None:
    served = model(*range(47))

    def taken(tokens: int) -> bool:
        try:
            check_length(Prompt([999] * tokens, "text"), served, layers=len(layers))
        except InvalidField:
            return False
        return True

    low, high = 1, CONTEXT
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) else (low, middle)
    assert ANSWER_BYTES * 0.9 < len(answer(served, low, layers)) <= ANSWER_BYTES
    with pytest.raises(InvalidField, match=f"of at most {ANSWER_BYTES}.* fewer layers") as caught:
        check_length(Prompt([999] * high, "text"), served, layers=len(layers))
    assert caught.value.field == "text"


def test_a_text_too_long_for_the_context_is_refused_even_where_the_answer_were_small() -> None:
    served = model(0)
    served = replace(served, bounds=replace(served.bounds, max_context=10))
    with pytest.raises(InvalidField, match="has 11 tokens; the context holds 10"):
        check_length(Prompt([1] * 11, "text"), served, layers=1)
    check_length(Prompt([1] * 10, "text"), served, layers=1)


def test_chunks_are_joined_and_layers_picked_by_number() -> None:
    served = model(2, 4, 9)
    ids = np.arange(3 * 5 * K, dtype=np.int32).reshape(3, 5, K)
    parts = [Routes(ids[:, at], ids[:, at] / np.float32(2), ids[:, at, 0] / np.float32(4)) for at in (slice(0, 2), slice(2, 5))]
    picked = [pick_layers(part, (9, 2), served) for part in parts]
    told = route_response(Request("r", (1, 2, 3, 4, 5), GREEDY, trace=True), picked, layers=(9, 2), model=served, now=0.0)
    assert list(told.layers) == [9, 2]
    assert list(told.experts.shape) == [2, 5, K]
    assert list(told.margins.shape) == [2, 5]
    assert np.array_equal(np.frombuffer(told.experts.data, "<i4").reshape(2, 5, K), ids[[2, 0]])
    assert np.array_equal(np.frombuffer(told.weights.data, "<f4").reshape(2, 5, K), ids[[2, 0]] / 2)
    assert np.array_equal(np.frombuffer(told.margins.data, "<f4").reshape(2, 5), ids[[2, 0], :, 0] / 4)
    assert list(told.token_bytes) == [b""] * 5
