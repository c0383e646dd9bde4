"""The recipe of the model `tiny`: held-out documents stay out, kinds get equal parts, a stopped training goes on where it was."""

from __future__ import annotations

import json
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ops.tiny import data, schedule
from ops.tiny.figures import Trace, figures, joined, load_ratio, repeats, table
from ops.tiny.splits import KINDS, TEST, VALIDATION, split_of

TINY = Path(data.__file__).parent
LISTING = json.loads((TINY / "documents.json").read_text(encoding="utf-8"))


def documents() -> data.Documents:
    """Every kind with all its held-out documents and some of training, each of a letter of its own."""
    names = {kind: [*TEST[kind], *VALIDATION[kind], "seen", "seen too"] for kind in KINDS}
    letters = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return {kind: {name: next(letters) * (40 + position) for position, name in enumerate(of)} for kind, of in names.items()}


def test_a_document_is_in_one_part_and_held_out_ones_are_not_in_training() -> None:
    made = documents()
    for kind in KINDS:
        parts = {split: data.in_split(made, kind, split) for split in data.SPLITS}
        assert set(parts["test"]) == set(TEST[kind])
        assert set(parts["validation"]) == set(VALIDATION[kind])
        assert set(parts["train"]) == {"seen", "seen too"}


def test_the_tokenizer_sees_training_text_alone_equally_much_of_each_kind() -> None:
    made = documents()
    sample = "".join(data.bpe_sample(made))
    held_out = {made[kind][name][0] for kind in KINDS for name in (*TEST[kind], *VALIDATION[kind])}
    assert not held_out & set(sample)
    sizes = [sum(sample.count(text[0]) for text in data.in_split(made, kind, "train").values()) for kind in KINDS]
    assert max(sizes) - min(sizes) <= 2  # a document is cut to whole characters


def test_what_was_trained_on_shares_no_document_between_its_parts() -> None:
    digests = {split: {digest for kind in KINDS for digest in LISTING[kind][split].values()} for split in data.SPLITS}
    assert not digests["train"] & (digests["validation"] | digests["test"])
    assert not digests["validation"] & digests["test"]
    for kind in KINDS:
        assert set(LISTING[kind]["test"]) == set(TEST[kind])
        assert set(LISTING[kind]["validation"]) == set(VALIDATION[kind])
        assert all(split_of(kind, name) == "train" for name in LISTING[kind]["train"])
        assert len(LISTING[kind]["train"]) >= 40
    plays = [name for split in data.SPLITS for name in LISTING["shakespeare"][split]]
    assert not any(name.endswith("_f") for name in plays)  # the same plays in the Folio's spelling


def test_no_long_piece_of_the_shipped_python_is_in_modules_trained_on() -> None:
    train = data.in_split({"python": data.python(Path(sysconfig.get_paths()["stdlib"]))}, "python", "train")
    together = "\n".join(train.values())
    text = (TINY / "texts" / "python.txt").read_text(encoding="utf-8")
    pieces = [text[start : start + 200] for start in range(0, len(text) - 200, 200)]
    assert len(pieces) > 200
    assert sum(piece in together for piece in pieces) == 0


def test_books_are_cut_at_the_headings_of_chapters() -> None:
    printed = "\nRuth 1\n\n  1 Now it came to pass.\n  2 And the name\n\nRuth 2\n\n  1 And Naomi\n\n1 Samuel 1\n\n  1 Now there was\n"
    assert data.books(printed) == {
        "Ruth": "Ruth 1\n\n1 Now it came to pass.\n2 And the name\n\nRuth 2\n\n1 And Naomi\n",
        "1 Samuel": "1 Samuel 1\n\n1 Now there was\n",
    }


def test_an_excerpt_is_whole_lines_of_every_document() -> None:
    assert data.excerpt({"a": "one\n" * 10, "b": "short\n"}, characters=20) == "one\none\nshort\n"


def test_a_source_without_a_held_out_document_is_refused() -> None:
    made = documents()
    del made["bible"]["Ruth"]
    with pytest.raises(SystemExit, match="bible source has no Ruth"):
        data.check_held_out(made)


def tokens() -> schedule.Tokens:
    """Kinds told apart by their ids."""
    return {kind: np.arange(1, 3000, dtype=np.uint16) + 10_000 * (index + 1) for index, kind in enumerate(KINDS)}


def test_a_batch_depends_on_seed_and_step_alone_and_kinds_take_turns() -> None:
    seen: list[str] = []
    for step in range(3):
        rows, kinds = schedule.batch(tokens(), step=step, seed=1, context=512)
        again, _ = schedule.batch(tokens(), step=step, seed=1, context=512)
        assert (rows == again).all()
        assert rows.shape == (4, 513)
        assert [KINDS[row[1] // 10_000 - 1] for row in rows] == kinds
        seen += kinds
    assert {kind: seen.count(kind) for kind in KINDS} == dict.fromkeys(KINDS, 4)
    assert (schedule.batch(tokens(), step=0, seed=2, context=512)[0] != schedule.batch(tokens(), step=0, seed=1, context=512)[0]).any()


def test_some_windows_begin_with_bos_and_all_others_are_the_text() -> None:
    rows = np.concatenate([schedule.batch(tokens(), step=step, seed=1, context=512)[0] for step in range(20)])
    assert 0.3 < float((rows[:, 0] == schedule.BOS_ID).mean()) < 0.7
    assert (np.diff(rows[:, 1:], axis=1) == 1).all()


def test_the_rate_warms_up_falls_and_can_be_brought_to_zero_early() -> None:
    rates = [schedule.rate(step, steps=1000, finish=None) for step in range(1000)]
    assert max(rates) == pytest.approx(schedule.PEAK_RATE)
    assert rates[0] < rates[50] < rates[99]
    assert all(before > after for before, after in pairwise(rates[100:]))
    early = [schedule.rate(step, steps=1000, finish=(500, 600)) for step in range(601)]
    assert early[:501] == rates[:501]
    assert early[550] == pytest.approx(rates[500] / 2)
    assert early[600] == 0.0


def test_windows_are_long_at_the_end() -> None:
    lengths = [schedule.context_at(step, end=100) for step in range(100)]
    assert lengths == [schedule.SHORT] * 80 + [schedule.LONG] * 20
    assert schedule.batch(tokens(), step=0, seed=1, context=schedule.LONG)[0].shape == (2, 1025)


def test_load_is_1_when_even_and_experts_over_k_when_always_the_same() -> None:
    assert load_ratio(np.arange(8, dtype=np.int32).reshape(4, 2), 8) == 1.0
    assert load_ratio(np.tile(np.array([[3, 5]], np.int32), (10, 1)), 8) == 4.0


def test_repeats_do_not_cross_windows() -> None:
    chosen = np.array([[1, 0], [1, 2], [1, 0], [2, 0]], np.int32)
    assert repeats(chosen, 4) == pytest.approx(2 / 3)
    assert repeats(chosen, 2) == pytest.approx(1 / 2)


def test_figures_of_a_trace() -> None:
    gates = np.array([[[3.0, 1.0, 2.0, 0.5], [0.0, 4.0, 3.0, 2.5]]], np.float32)
    trace = Trace(np.log([0.5, 0.5]), np.array([[[0, 2], [1, 2]]], np.int32), gates, 2)
    found = figures(trace, experts=4)
    assert found.perplexity == pytest.approx(2.0)
    assert found.load == [2.0]
    assert found.repeats == [0.0]
    assert found.gap == [pytest.approx(0.75)]  # of 1.0 and 0.5
    assert "| both | 4 | 2.000 | 2.00 | 0 | 0.75 |" in table({"both": figures(joined([trace, trace]), experts=4)})
