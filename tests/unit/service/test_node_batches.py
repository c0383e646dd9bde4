"""What a node makes of a mini-batch before anything is computed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from colibri.v1 import experts_pb2 as pb
from service.node.batches import BatchError, check

HIDDEN, EXPERTS_OF, LARGEST = 8, (1, 4), 1 << 20  # layer 0 has no router: one expert only


def message(layer: int, experts: tuple[int, ...], counts: tuple[int, ...], rows: int, row_of_pair: tuple[int, ...] = ()) -> pb.ExpertBatch:
    return pb.ExpertBatch(
        layer=layer,
        experts=experts,
        counts=counts,
        dtype=pb.DATA_TYPE_F32,
        rows=rows,
        data=bytes(rows * HIDDEN * 4),
        row_of_pair=np.array(row_of_pair, np.int32).tobytes(),
    )


def refused(asked: pb.ExpertBatch) -> str:
    """The sentence, "" if it is taken."""
    try:
        check(asked, hidden=HIDDEN, experts_of=EXPERTS_OF, largest=LARGEST, prepared=False)
    except BatchError as error:
        return str(error)
    return ""


def test_an_expert_is_refused_that_its_own_layer_has_not() -> None:
    assert refused(message(1, (3,), (1,), 1)) == ""
    assert refused(message(0, (0,), (1,), 1)) == ""
    assert refused(message(0, (3,), (1,), 1)) == "experts: there is no expert 3, layer 0 has 1"
    assert refused(message(2, (0,), (1,), 1)) == "layer: there is no layer 2, the model has 2"


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1), (1, 2), (3,)])
def test_rows_ascend_within_each_expert_and_nowhere_else(counts: tuple[int, ...]) -> None:
    taken = 0
    for pairs in itertools.product(range(4), repeat=3):
        ends = list(itertools.accumulate(counts))
        own = [pairs[end - count : end] for end, count in zip(ends, counts, strict=True)]
        good = all(a < b for run in own for a, b in itertools.pairwise(run))
        assert (refused(message(1, tuple(range(len(counts))), counts, 4, pairs)) == "") == good
        taken += good
    assert taken > 0


def test_rows_whose_sums_would_be_too_long_an_answer_are_refused() -> None:
    rows = LARGEST // (4 * HIDDEN) + 1
    asked = message(1, (0,), (1,), rows, (0,))
    assert refused(asked) == ""
    asked.weights = bytes(4)
    assert refused(asked).startswith(f"rows: {rows} of them give an answer of more than {LARGEST} bytes")
    assert refused(message(1, (0,), (1,), rows - 1, (0,))) == ""


def test_pairs_without_row_numbers_are_the_rows_as_they_come() -> None:
    work = check(message(1, (0, 2), (1, 2), 3), hidden=HIDDEN, experts_of=EXPERTS_OF, largest=LARGEST, prepared=False)
    assert work.rows.tolist() == [0, 1, 2]
    assert refused(message(1, (0,), (1,), 3)).startswith("row_of_pair: it is empty")
