"""The states of a request."""

from __future__ import annotations

import itertools

import pytest

from engine_c import GREEDY
from service.request import LIVE, TRANSITIONS, IllegalTransition, Request, State


@pytest.mark.parametrize(("before", "after"), [*itertools.product(State, State)])
def test_only_the_tables_transitions_are_legal(before: State, after: State) -> None:
    request = Request("r", (1, 2), GREEDY)
    request.state = before
    if after in TRANSITIONS[before]:
        request.move(after)
        assert request.state is after
    else:
        with pytest.raises(IllegalTransition, match=r"r: .* -> "):
            request.move(after)


def test_finished_aborted_and_failed_are_final() -> None:
    assert set(State) - LIVE == {State.FINISHED, State.ABORTED, State.FAILED}


def test_a_score_leaves_its_last_token_uncomputed() -> None:
    assert Request("r", (1, 2, 3), GREEDY, score=True).pending == 2
    assert Request("r", (1, 2, 3), GREEDY).pending == 3
