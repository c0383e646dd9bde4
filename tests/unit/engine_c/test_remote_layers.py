"""Layers that are computed elsewhere, and blocks of experts by themselves, give the bits they give here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from engine_c import Damping, EngineError, Model, RemoteExperts, RemoteLayers, RemoteLost, SeqWork, Session, SessionOptions
from engine_c.route_rows import route_rows
from ops.random_model import ModelShape, make_model

SHAPE = ModelShape(layers=3, hidden=80, heads=4, kv_heads=2, ffn=80, experts=8, top_k=3, vocab=160, max_context=256)
OPTIONS = SessionOptions(max_rows=64, max_seqs=8, max_logit_rows=64, kv_blocks=64, front_lane=1, split_down=1)
Floats = npt.NDArray[np.float32]
CUTS = [((a, b),) for a, b in combinations(range(SHAPE.layers + 1), 2)] + [((0, 1), (1, 3)), ((0, 1), (2, 3))]


@pytest.fixture(scope="module", params=["f32", "bf16", "int8", "int4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("model") / "m.colibri"
    make_model(path, SHAPE, quant=request.param, seed=5)
    with Model.open(path) as opened:
        yield opened


@dataclass
class Elsewhere:
    """Another session has the layers, and the experts that are remote."""

    node: Session
    calls: int = 0
    lose_at: int = 0
    spoil: int = -1

    def send(self, call: RemoteExperts) -> None:
        return

    def receive(self, call: RemoteExperts) -> None:
        experts = sorted(call.missing)
        call.put(experts, self.node.run_experts(call.pack(experts)))

    def run_layers(self, call: RemoteLayers) -> None:
        self.calls += 1
        if self.calls == self.lose_at:
            raise RemoteLost("the cable is cut")
        found = self.node.run_layers(call.work, call.first, call.end, call.x)
        if self.spoil >= 0:
            found[self.spoil] = np.nan
        call.x[:] = found


def prompts() -> list[SeqWork]:
    return [SeqWork([(7 * i + k) % SHAPE.vocab for k in range(n)], 0, range(i * 8, i * 8 + 8), 1) for i, n in enumerate((1, 20, 40))]


def run(session: Session, elsewhere: Elsewhere | None = None) -> list[Floats]:
    """Logits of a prefill and of three steps after it."""
    found, work = [], prompts()
    for _ in range(4):
        results, _ = session.step(work, remote=elsewhere)
        assert all(result.ok for result in results)
        found.append(session.logits())
        work = [replace(w, tokens=[r.rows[0].token], start=w.start + len(w.tokens)) for r, w in zip(results, work, strict=True)]
    return found


def same(got: Sequence[Floats], want: Sequence[Floats]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("split_down", [0, 1])
def test_bits_are_those_of_a_step_without(model: Model, split_down: int) -> None:
    options = replace(OPTIONS, split_down=split_down)
    with Session(model, options) as plain:
        expected = run(plain)
    for cut in CUTS:
        with Session(model, options) as front, Session(model, options) as node:
            front.set_remote(None, cut)
            elsewhere = Elsewhere(node)
            assert same(run(front, elsewhere), expected), cut
            assert elsewhere.calls == 4 * len(cut)


def test_layers_and_experts_of_the_others(model: Model) -> None:
    with Session(model, OPTIONS) as front, Session(model, OPTIONS) as node:
        expected = run(front)
        front.set_remote(np.ones((SHAPE.layers, SHAPE.experts), np.bool_), [(1, 2)])
        assert same(run(front, Elsewhere(node)), expected)
        front.set_remote(None)
        assert same(run(front), expected)


def test_lost_step_never_was(model: Model) -> None:
    with Session(model, OPTIONS) as front, Session(model, OPTIONS) as node:
        expected = run(front)
        front.set_remote(None, [(0, 1), (2, 3)])
        with pytest.raises(RemoteLost, match="cable"):
            front.step(prompts(), remote=Elsewhere(node, lose_at=2))
        assert same(run(front, Elsewhere(node)), expected)
        with pytest.raises(EngineError, match="nobody was named"):
            run(front)


def test_bad_row_from_elsewhere_spoils_its_sequence_alone(model: Model) -> None:
    with Session(model, OPTIONS) as front, Session(model, OPTIONS) as node:
        for cut in [(0, 3)], [(0, 1)]:
            front.set_remote(None, cut)
            results, _ = front.step(prompts(), remote=Elsewhere(node, spoil=5))
            assert [result.ok for result in results] == [True, False, True], cut


@pytest.mark.parametrize("layers", [[(-1, 1)], [(0, 4)], [(1, 1)], [(2, 1)], [(0, 2), (1, 3)], [(1, 2), (0, 1)], [(0, 1)] * 4])
def test_senseless_ranges_are_refused(model: Model, layers: list[tuple[int, int]]) -> None:
    with Session(model, OPTIONS) as front, pytest.raises(EngineError, match="ranges") as refused:
        front.set_remote(None, layers)
    assert refused.value.name == "EINVAL"


def test_what_needs_every_layers_router_is_refused(model: Model) -> None:
    with Session(model, replace(OPTIONS, trace_routes=1)) as front:
        front.set_remote(None, [(1, 2)])
        for change, says in ({"routes": True}, "margins of routes"), ({"damping": Damping("heat")}, "damping"):
            with pytest.raises(EngineError, match=says):
                front.step([replace(prompts()[0], **change)])
        with pytest.raises(EngineError, match="routes are not known"):
            front.routes(1)


def test_malformed_calls_are_refused(model: Model) -> None:
    x = np.zeros((61, SHAPE.hidden), np.float32)
    with Session(model, OPTIONS) as node:
        for first, end in ((-1, 1), (0, 4), (2, 2), (3, 2)):
            with pytest.raises(EngineError, match="layers"):
                node.run_layers(prompts(), first, end, x)
        with pytest.raises(EngineError, match="60 rows"):
            node.run_layers(prompts(), 0, 1, x[:60])
        with pytest.raises(EngineError, match="shape"):
            node.run_layers(prompts(), 0, 1, x[:, :79])
        with pytest.raises(EngineError, match="KV block 64"):
            node.run_layers([replace(prompts()[0], blocks=[64])], 0, 1, x[:1])
        for layer in -1, SHAPE.layers:
            with pytest.raises(EngineError, match=f"layer {layer}"):
                node.run_moe(layer, x)
        with pytest.raises(EngineError, match="0 rows"):
            node.run_moe(0, x[:0])


@pytest.mark.parametrize("split_down", [0, 1])
def test_block_is_its_experts_weighted_sum_whatever_the_rows_number(model: Model, split_down: int) -> None:
    x = np.random.default_rng(3).standard_normal((150, SHAPE.hidden)).astype(np.float32)  # more than max_rows
    with Session(model, replace(OPTIONS, split_down=split_down)) as node:
        before = node.expert_counts().sum()
        out, experts, weights = node.run_moe(1, x)
        for at in range(0, 150, 50):
            routed = route_rows(node, 1, x[at : at + 50])
            assert np.array_equal(routed.ids, experts[at : at + 50])
            assert np.array_equal(routed.weights, weights[at : at + 50])
        for row in 0, 63, 64, 149:
            assert np.array_equal(node.run_moe(1, x[row : row + 1])[0][0], out[row])
        assert node.expert_counts().sum() == before
        spoilt = x.copy()
        spoilt[70, 3] = np.nan
        again = node.run_moe(1, spoilt)[0]
        assert np.isnan(again[70]).all()
        assert np.array_equal(np.delete(again, 70, 0), np.delete(out, 70, 0))
