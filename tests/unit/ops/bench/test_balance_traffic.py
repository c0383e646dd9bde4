"""Traffic of a judgement: what each stream reads, and that no token is read twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ops.bench.balance_traffic import MIXED, ROUNDS, SHIFTING, Texts, Traffic, load_texts, make_traffic, names
from ops.bench.measure import BenchError

LENGTHS = {"bible": 900, "python": 1500, "shakespeare": 1200}


def texts(*, first: int | None = None) -> Texts:
    """Texts whose every token is another number, so that a token says where it stands."""
    return Texts({kind: np.arange(length, dtype=np.int32) + 10_000 * (i + 1) for i, (kind, length) in enumerate(LENGTHS.items())}, first)


def made(name: str, **wish: int) -> Traffic:
    return make_traffic(name, texts(), **{"streams": 6, "steps": 120, "context": 32} | wish)


@pytest.mark.parametrize("name", names(texts()))
def test_every_token_is_predicted_once_from_the_one_before(name: str) -> None:
    traffic = made(name)
    assert (traffic.targets == traffic.tokens + 1).all()
    assert max(Counter(traffic.targets.ravel().tolist()).values()) == 1


@pytest.mark.parametrize("name", names(texts()))
def test_positions_count_up_to_less_than_the_context_and_an_excerpt_is_one_stream_s(name: str) -> None:
    traffic = made(name, steps=360)
    assert traffic.positions.max() == 31
    follows = (traffic.positions[1:] == traffic.positions[:-1] + 1) & (traffic.tokens[1:] == traffic.tokens[:-1] + 1)
    begins = traffic.positions[1:] == 0
    assert (follows | begins).all()
    assert (begins == (np.diff(traffic.excerpts, axis=0) != 0)).all()
    for column in range(traffic.streams):
        others = np.delete(traffic.excerpts, column, axis=1)
        assert not np.isin(traffic.excerpts[:, column], others).any()


def test_mixed_has_all_kinds_in_every_step_and_streams_begin_anew_apart() -> None:
    traffic = made(MIXED)
    assert (np.sort(traffic.kind, axis=1) == [0, 0, 1, 1, 2, 2]).all()
    restarts = (traffic.positions[1:] == 0).sum(axis=1)
    assert restarts.max() == 1


def test_shifting_has_one_kind_at_a_time_and_comes_to_each_as_often() -> None:
    traffic = made(SHIFTING)
    assert (traffic.kind == traffic.kind[:, :1]).all()
    changes = np.flatnonzero(np.diff(traffic.kind[:, 0]))
    assert len(changes) == ROUNDS * len(LENGTHS) - 1
    assert Counter(traffic.kind[:, 0].tolist()) == dict.fromkeys(range(3), 40)


def test_one_kind_reads_only_that() -> None:
    assert (made("python").kind == 1).all()


def test_no_more_steps_are_made_than_the_shortest_text_has() -> None:
    assert made("bible", steps=10_000).steps == (900 - 1) // 6
    assert made(MIXED, steps=10_000).steps == (900 - 1) // 2


def test_a_first_token_stands_before_every_excerpt_whose_tokens_are_all_predicted() -> None:
    traffic = make_traffic(MIXED, texts(first=7), streams=3, steps=100, context=32)
    plain = make_traffic(MIXED, texts(), streams=3, steps=100, context=32)
    assert (traffic.tokens[traffic.positions == 0] == 7).all()
    assert (traffic.targets == plain.tokens).all()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no traffic 'poems': one of mixed, shifting, bible, python, shakespeare"):
        made("poems")
    with pytest.raises(BenchError, match="too short for 600 streams"):
        made("bible", streams=600)
    with pytest.raises(BenchError, match=r"has no \.txt files"):
        load_texts(tmp_path / "none.colibri", tmp_path)


def test_texts_of_a_folder_are_kinds_by_file_name(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello hello hello", encoding="utf-8")
    (tmp_path / "b.txt").write_text("world", encoding="utf-8")
    found = load_texts(tiny_model, tmp_path)
    assert list(found.kinds) == ["a", "b"]
    assert len(found.kinds["a"]) > len(found.kinds["b"]) > 0
