"""Experts that are computed elsewhere give the bits they give here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest

from engine_c import Damping, EngineError, ExpertBatch, Model, RemoteExperts, RemoteLost, SeqWork, Session, SessionOptions, Telemetry
from ops.random_model import ModelShape, make_model

SHAPE = ModelShape(layers=3, hidden=96, heads=4, kv_heads=2, ffn=80, experts=8, top_k=3, vocab=160, max_context=256)
OPTIONS = SessionOptions(max_rows=64, max_seqs=8, max_logit_rows=64, kv_blocks=64, max_lanes=0, front_lane=1, split_down=1)
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=["f32", "bf16", "int8", "int4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("model") / "m.colibri"
    make_model(path, SHAPE, quant=request.param, seed=5)
    with Model.open(path) as opened:
        yield opened


@dataclass
class Elsewhere:
    """Another session computes what `its` says is its own; what is left is computed here after all."""

    node: Session
    its: Callable[[int, int], bool] = lambda layer, expert: True
    lose: bool = False
    calls: int = 0
    sent: list[ExpertBatch] = field(default_factory=list)

    def send(self, call: RemoteExperts) -> None:
        self.calls += 1
        assert call.missing == set(call.counts)
        own = [expert for expert in call.counts if self.its(call.layer, expert)]
        self.sent = [call.pack(own[:1]), call.pack(own[1:])] if own else []

    def receive(self, call: RemoteExperts) -> None:
        if self.lose:
            raise RemoteLost("the cable is cut")
        for batch in self.sent:
            if batch.experts:
                check_pairs(batch)
                call.put(batch.experts, self.node.run_experts(batch))
        call.compute(sorted(call.missing))


def check_pairs(batch: ExpertBatch) -> None:
    """Each expert's rows ascend, and every row is somebody's."""
    rows = np.frombuffer(batch.row_of_pair, np.int32)
    assert set(rows.tolist()) == set(range(batch.n_rows))
    for own in np.split(rows, np.cumsum(batch.counts)[:-1]):
        assert (np.diff(own) > 0).all()


def run(session: Session, elsewhere: Elsewhere | None = None) -> list[Logits]:
    """Logits of a prefill of three prompts of 1, 20 and 40 tokens and of four steps after it."""
    found, blocks = [], [range(i * 8, i * 8 + 8) for i in range(3)]
    work = [SeqWork([(7 * i + k) % SHAPE.vocab for k in range(n)], 0, blocks[i], 1) for i, n in enumerate((1, 20, 40))]
    for _ in range(5):
        results, _ = session.step(work, remote=elsewhere)
        assert all(result.ok for result in results)
        found.append(session.logits())
        work = [SeqWork([r.rows[0].token], w.start + len(w.tokens), w.blocks, 1) for r, w in zip(results, work, strict=True)]
    return found


def test_bits_are_those_of_a_step_without(model: Model) -> None:
    with Session(model, replace(OPTIONS, split_down=0)) as plain:
        expected = run(plain)
    everything = np.ones((SHAPE.layers, SHAPE.experts), np.bool_)
    half = np.random.default_rng(1).random(everything.shape) < 0.5
    with Session(model, OPTIONS) as front, Session(model, OPTIONS) as node:
        for remote, its in (
            (everything, lambda layer, expert: True),
            (half, lambda layer, expert: True),
            (everything, lambda layer, expert: expert % 2 == 0),
            (everything, lambda layer, expert: False),
        ):
            front.set_remote(remote)
            elsewhere = Elsewhere(node, its)
            for step, (got, want) in enumerate(zip(run(front, elsewhere), expected, strict=True)):
                assert np.array_equal(got, want), f"step {step}"
            assert elsewhere.calls == 5 * SHAPE.layers
        front.set_remote(None)
        assert all(np.array_equal(a, b) for a, b in zip(run(front), expected, strict=True))


def test_lost_step_never_was(model: Model) -> None:
    with Session(model, OPTIONS) as front, Session(model, OPTIONS) as node:
        expected = run(front)
        front.set_remote(np.ones((SHAPE.layers, SHAPE.experts), np.bool_))
        with pytest.raises(RemoteLost, match="cable"):
            run(front, Elsewhere(node, lose=True))
        assert all(np.array_equal(a, b) for a, b in zip(run(front, Elsewhere(node)), expected, strict=True))
        with pytest.raises(EngineError, match="nobody was named"):
            run(front)


def test_rows_as_numbers_are_prepared_there(model: Model) -> None:
    x = np.random.default_rng(2).standard_normal((5, SHAPE.hidden)).astype(np.float32)
    pairs = np.array([0, 1, 4, 2, 3], np.int32).tobytes()
    batch = ExpertBatch(1, (2, 6), (3, 2), x.tobytes(), 5, pairs)
    with Session(model, OPTIONS) as node:
        whole = np.frombuffer(node.run_experts(batch, kind="f32"), np.float32).reshape(5, -1)
        for pair, (expert, row) in enumerate([(2, 0), (2, 1), (2, 4), (6, 2), (6, 3)]):
            alone = ExpertBatch(1, (expert,), (1,), x[row].tobytes(), 1, bytes(4))
            assert np.array_equal(np.frombuffer(node.run_experts(alone, kind="f32"), np.float32), whole[pair])
        halves = (x.view(np.uint32) >> 16).astype(np.uint16)
        rounded = (halves.astype(np.uint32) << 16).view(np.float32)
        a = node.run_experts(replace(batch, rows=halves.tobytes()), kind="bf16")
        assert a == node.run_experts(replace(batch, rows=rounded.tobytes()), kind="f32")
        x[4, 3] = np.nan
        spoilt = np.frombuffer(node.run_experts(replace(batch, rows=x.tobytes()), kind="f32"), np.float32).reshape(5, -1)
        assert np.isnan(spoilt[2]).all()
        assert np.array_equal(np.delete(spoilt, 2, 0), np.delete(whole, 2, 0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer": 3}, "layer 3"),
        ({"layer": -1}, "layer -1"),
        ({"experts": (6, 2)}, "ascend"),
        ({"experts": (2, 8)}, "expert 8"),
        ({"counts": (0, 5)}, "expert 2 has 0"),
        ({"n_rows": 4}, "4 rows have"),
        ({"n_rows": 65}, "1 to 64"),
        ({"rows": b"123"}, "5 rows have"),
        ({"row_of_pair": np.array([0, 1, 5, 2, 3], np.int32).tobytes()}, "row 5"),
        ({"row_of_pair": b""}, "do not fit"),
        ({"weights": b"1234"}, "do not fit"),
    ],
)
def test_malformed_batches_are_refused_by_name(model: Model, change: dict[str, object], says: str) -> None:
    pairs = np.array([0, 1, 4, 2, 3], np.int32).tobytes()
    batch = ExpertBatch(1, (2, 6), (3, 2), bytes(4 * 5 * SHAPE.hidden), 5, pairs)
    with Session(model, OPTIONS) as node, pytest.raises(EngineError, match=says):
        node.run_experts(replace(batch, **change), kind="f32")  # type: ignore[arg-type]


def test_session_that_adds_at_once_takes_no_part(model: Model) -> None:
    with Session(model, replace(OPTIONS, split_down=0)) as plain:
        with pytest.raises(EngineError, match="split_down"):
            plain.set_remote(np.ones((SHAPE.layers, SHAPE.experts), np.bool_))
        with pytest.raises(EngineError, match="split_down"):
            plain.run_experts(ExpertBatch(0, (0,), (1,), bytes(4 * SHAPE.hidden), 1, bytes(4)), kind="f32")


def damped_run(session: Session, elsewhere: Elsewhere | None, *, lose: bool) -> list[tuple[Logits, int]]:
    """Logits and changed pairs of six steps of two sequences; lose: each step is given up in its last layer and tried again."""
    damping = Damping(kind="heat", scope="sequence", growth=8.0, decay=0.9, margin=10.0, max_rerouted=1.0)
    work = [SeqWork(list(range(9 + i)), 0, range(i * 8, i * 8 + 8), 1, damping=damping, slot=i) for i in range(2)]
    found = []
    for _ in range(6):
        if lose:
            with pytest.raises(RemoteLost):
                session.step(work, remote=LostAtLast(session))
        results, _ = session.step(work, remote=elsewhere)
        found.append((session.logits(), sum(result.rerouted for result in results)))
        work = [replace(w, tokens=[r.rows[0].token], start=w.start + len(w.tokens)) for r, w in zip(results, work, strict=True)]
    return found


def counts_of(telemetry: Telemetry) -> dict[str, list[int]]:
    return {name: getattr(telemetry, name).ravel().tolist() for name in Telemetry.__slots__}


class LostAtLast(Elsewhere):
    """Computes everything here, and is lost in the last layer."""

    def send(self, call: RemoteExperts) -> None:
        self.lose = call.layer == SHAPE.layers - 1


def test_damped_step_given_up_leaves_no_trace_in_the_next(model: Model) -> None:
    with Session(model, replace(OPTIONS, max_slots=4)) as front:
        expected, counted = damped_run(front, None, lose=False), counts_of(front.telemetry())
        assert sum(changed for _, changed in expected) > 0
    with Session(model, replace(OPTIONS, max_slots=4)) as front:
        front.set_remote(np.ones((SHAPE.layers, SHAPE.experts), np.bool_))
        got = damped_run(front, Elsewhere(front, lambda layer, expert: False), lose=True)
        assert counts_of(front.telemetry()) == counted
    for (logits, changed), (want, want_changed) in zip(got, expected, strict=True):
        assert np.array_equal(logits, want)
        assert changed == want_changed
