"""The scheduler against a model of the engine: a KV memory that knows what it should hold, and an oracle for every answer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_c import GREEDY, Damping, Routes, RowResult, SeqResult, SeqWork
from service.blocks import BLOCK, BlockPool, blocks_for
from service.faults import DeadlineExpired, DeadlineUnmeetable, EngineFault, Fault, InvalidField, QueueFull
from service.plan import Limits, Plan, Update
from service.request import Reason, Request, State
from service.scheduler import Scheduler

VOCAB = 40
STOP_TOKEN = 39
LAYERS = 3  # that have a router
HEAT, COLD = Damping("heat", scope="sequence"), Damping("capacity", scope="sequence")


def key(tokens: Sequence[int], damping: Damping | None) -> int:
    """What the keys and values of the last of these tokens depend on."""
    return hash((tuple(tokens), zlib.crc32(repr(damping).encode())))  # the same in every process


def next_token(tokens: tuple[int, ...], damping: Damping | None = None) -> int:
    """What the model of the engine samples behind these tokens."""
    return key(tokens, damping) % VOCAB


def oracle(prompt: tuple[int, ...], max_tokens: int, *, stop: int = STOP_TOKEN, damping: Damping | None = None) -> list[int]:
    """The answer of a request that runs alone."""
    output: list[int] = []
    while len(output) < max_tokens and (not output or output[-1] != stop):
        output.append(next_token((*prompt, *output), damping))
    return output


def expert(tokens: Sequence[int]) -> int:
    """What the last of these tokens visits."""
    return hash(tuple(tokens)) % 8


class Memory:
    """KV memory and routing state that check themselves: every position must hold the key of exactly its own prefix, routed as its own
    request is, when it is attended to; and a damped request's slot the state of exactly the tokens before."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, int], int] = {}
        self._slots: dict[int, list[int]] = {}

    def run_all(self, plan: Plan) -> list[SeqResult]:
        taken = [share.work.slot for share in plan.shares if share.work.slot != -1]
        assert len(set(taken)) == len(taken)
        return [self.run(share.work, share.request.tokens) for share in plan.shares]

    def run(self, work: SeqWork, tokens: list[int]) -> SeqResult:
        end = work.start + len(work.tokens)
        assert list(work.tokens) == tokens[work.start : end]
        assert len(work.blocks) >= blocks_for(end)
        self._route(work, tokens[:end])
        for position in range(work.start, end):
            self._keys[work.blocks[position // BLOCK], position % BLOCK] = key(tokens[: position + 1], work.damping)
        for position in range(end):
            assert self._keys[work.blocks[position // BLOCK], position % BLOCK] == key(tokens[: position + 1], work.damping)
        targets = work.targets or [-1] * work.n_logits
        first = end - work.n_logits + 1
        rows = [RowResult(next_token(tuple(tokens[: first + i]), work.damping), -1.0, -float(t), 0, ()) for i, t in enumerate(targets)]
        ids = np.array([[[expert(tokens[: position + 1])] for position in range(work.start, end)]] * LAYERS, np.int32)
        routes = Routes(ids, ids.astype(np.float32), ids[..., 0].astype(np.float32)) if work.routes else None
        return SeqResult(True, "", tuple(rows), 0 if work.damping is None else len(work.tokens), routes)

    def _route(self, work: SeqWork, tokens: list[int]) -> None:
        assert -1 <= work.slot < MAX_SEQS
        if work.damping is not None:
            assert work.slot >= 0
            assert not work.start or self._slots[work.slot] == tokens[: work.start]
        self._slots[work.slot] = tokens


MAX_SEQS = 4


def make(*, blocks: int = 8, max_rows: int = 12, max_seqs: int = MAX_SEQS, max_queue: int = 6, max_queue_tokens: int = 400) -> Scheduler:
    limits = Limits(
        max_rows=max_rows,
        max_seqs=max_seqs,
        max_logit_rows=max_seqs + 1,
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        max_slots=max_seqs,
        router_layers=LAYERS,
    )
    return Scheduler(limits, BlockPool(blocks))


def request(
    name: str,
    prompt: tuple[int, ...],
    *,
    max_tokens: int = 4,
    deadline: float | None = None,
    score: bool = False,
    trace: bool = False,
    damping: Damping | None = None,
) -> Request:
    return Request(name, prompt, GREEDY, max_tokens, frozenset({STOP_TOKEN}), deadline, score, trace=trace, damping=damping)


def run(scheduler: Scheduler, memory: Memory, *, now: float) -> list[Update]:
    plan = scheduler.schedule(now=now)
    news = scheduler.take_news()
    if not plan.shares:
        return news
    return news + scheduler.complete(plan, memory.run_all(plan), now=now + 0.01)


def run_all(scheduler: Scheduler, memory: Memory | None = None, *, steps: int = 2000) -> dict[str, list[Update]]:
    memory, now = memory or Memory(), 0.0
    updates: dict[str, list[Update]] = {}
    for _ in range(steps):
        if not scheduler.has_work():
            return updates
        for update in run(scheduler, memory, now=now):
            updates.setdefault(update.request.id, []).append(update)
        scheduler.check_integrity()
        now += 0.01
    raise AssertionError("the scheduler does not come to an end")


def test_every_request_gets_the_answer_it_gets_alone_though_memory_is_short() -> None:
    scheduler = make(blocks=5, max_queue=20)
    prompts = [tuple((i * j) % 5 for j in range(1 + 7 * i)) for i in range(8)]
    requests = [request(str(i), prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
    for r in requests:
        r.stop_ids = frozenset()
        scheduler.add(r, now=0.0)
    updates = run_all(scheduler)
    for r in requests:
        assert list(r.output) == oracle(r.prompt, 30, stop=-1)
        assert sum(update.final for update in updates[r.id]) == 1
    assert scheduler.preemptions > 0
    assert scheduler.pool.stats().held == 0


def test_decodes_go_before_prefills_and_prefills_are_cut_to_the_row_budget() -> None:
    scheduler, memory = make(), Memory()
    scheduler.add(request("old", (1, 2)), now=0.0)
    run(scheduler, memory, now=0.0)
    scheduler.add(request("new", tuple(range(4)) * 10), now=0.1)
    plan = scheduler.schedule(now=0.2)
    assert [(share.request.id, len(share.work.tokens), share.work.n_logits) for share in plan.shares] == [("old", 1, 1), ("new", 11, 0)]


def test_a_slow_prefill_is_cut_smaller_while_answers_are_under_way() -> None:
    limits = Limits(max_rows=100, max_seqs=4, max_logit_rows=4, max_queue=9, max_queue_tokens=900, prefill_seconds=0.4)
    scheduler, memory = Scheduler(limits, BlockPool(40)), Memory()
    scheduler.add(request("old", (1,) * 100, max_tokens=50), now=0.0)
    plan = scheduler.schedule(now=0.0)
    scheduler.complete(plan, [memory.run(s.work, s.request.tokens) for s in plan.shares], now=1.0)  # 100 rows a second
    scheduler.add(request("new", (2,) * 200), now=1.0)
    rows = {share.request.id: len(share.work.tokens) for share in scheduler.schedule(now=1.0).shares}
    assert rows == {"old": 1, "new": 40}


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    scheduler, memory = make(blocks=20), Memory()
    prompt = tuple(i % 5 for i in range(3 * BLOCK + 2))
    for name in ("first", "second"):
        again = request(name, prompt)
        scheduler.add(again, now=0.0)
        run_all(scheduler, memory)
    assert again.cached == 3 * BLOCK
    stats = scheduler.stats().pool
    assert (stats.queried_tokens, stats.hit_tokens) == (2 * len(prompt), 3 * BLOCK)


def test_a_score_reports_a_row_for_every_token_but_the_first() -> None:
    scheduler = make(blocks=20)
    prompt = tuple(i % 5 for i in range(40))
    scored = request("s", prompt, score=True)
    scheduler.add(scored, now=0.0)
    updates = run_all(scheduler)["s"]
    assert [-int(row.target_logprob) for update in updates for row in update.rows] == list(prompt[1:])
    assert updates[-1].reason is Reason.SCORED


def test_a_trace_reports_the_experts_of_every_token_and_looks_nothing_up() -> None:
    scheduler, memory = make(blocks=20), Memory()
    prompt = tuple(i % 5 for i in range(40))
    for name in ("first", "second"):
        scheduler.add(request(name, prompt, trace=True), now=0.0)
        updates = run_all(scheduler, memory)[name]
        told = np.concatenate([update.routes.experts for update in updates if update.routes is not None], axis=1)
        assert told.shape == (LAYERS, 40, 1)
        assert told[0, :, 0].tolist() == [expert(prompt[: position + 1]) for position in range(40)]
        assert [update.start for update in updates] == [0, 12, 24, 36]
        assert not any(update.rows for update in updates)
        assert updates[-1].reason is Reason.ROUTED
    assert scheduler.stats().pool.queried_tokens == 0


@pytest.mark.parametrize("how", ["score", "trace"])
def test_a_score_or_trace_that_was_preempted_tells_where_it_begins_anew(how: str) -> None:
    scheduler, memory = make(blocks=6, max_rows=4, max_seqs=2), Memory()
    old = request("old", (1,) * 4, max_tokens=3 * BLOCK)
    old.stop_ids = frozenset()
    scheduler.add(old, now=0.0)
    while len(old.tokens) < BLOCK - 1:
        run(scheduler, memory, now=0.0)
    young = request("young", tuple(i % 5 for i in range(60)), score=how == "score", trace=how == "trace")
    scheduler.add(young, now=0.0)
    updates = run_all(scheduler, memory)["young"]
    assert young.preemptions > 0
    starts = [update.start for update in updates]
    again = max(at for at, start in enumerate(starts) if start == 0)
    assert again > 0
    if how == "score":
        assert [-int(row.target_logprob) for update in updates[again:] for row in update.rows] == list(young.prompt[1:])
    else:
        assert sum(update.routes.experts.shape[1] for update in updates[again:] if update.routes is not None) == 60


def test_damped_requests_neither_use_nor_feed_the_prefix_cache() -> None:
    scheduler, memory = make(blocks=20), Memory()
    prompt = tuple(i % 5 for i in range(3 * BLOCK + 2))
    for name, damping in (("plain", None), ("heat", HEAT), ("cold", COLD), ("heat again", HEAT)):
        one = request(name, prompt, damping=damping)
        scheduler.add(one, now=0.0)
        run_all(scheduler, memory)
        assert one.cached == 0
        assert list(one.output) == oracle(prompt, 4, damping=damping)
    again = request("plain again", prompt)
    scheduler.add(again, now=0.0)
    run_all(scheduler, memory)
    assert again.cached == 3 * BLOCK
    stats = scheduler.stats()
    assert stats.pool.cached == len(again.prompt) // BLOCK
    assert (stats.pool.queried_tokens, stats.pool.hit_tokens) == (2 * len(prompt), 3 * BLOCK)


def test_rerouted_pairs_are_counted_once_for_a_request_and_always_for_the_server() -> None:
    scheduler, memory = make(blocks=5), Memory()
    requests = [request(f"{i}", (i,) * 4, max_tokens=40, damping=HEAT) for i in range(3)] + [request("plain", (9,) * 4)]
    for r in requests:
        r.stop_ids = frozenset()
        scheduler.add(r, now=0.0)
    run_all(scheduler, memory)
    assert scheduler.preemptions > 0
    for r in requests:
        ran = r.most_tokens if r.damping is not None else 0
        assert (r.rerouted, r.routed) == (ran, ran * LAYERS)
    stats = scheduler.stats()
    assert stats.rerouted_pairs > sum(r.rerouted for r in requests)
    assert stats.damped_pairs == LAYERS * stats.rerouted_pairs


def test_without_slots_in_the_engine_nobody_has_one() -> None:
    scheduler = Scheduler(Limits(max_rows=8, max_seqs=2, max_logit_rows=2, max_queue=1, max_queue_tokens=9), BlockPool(2))
    scheduler.add(request("r", (1,)), now=0.0)
    assert [work.slot for work in scheduler.schedule(now=0.0).work] == [-1]
    with pytest.raises(ValueError, match="max_slots 1"):
        Limits(max_rows=8, max_seqs=2, max_logit_rows=2, max_queue=1, max_queue_tokens=9, max_slots=1)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request("r", ()), "input"),
        (request("r", (1,), score=True), "input"),
        (request("r", (1,) * 100, max_tokens=100), "max_tokens"),
        (request("r", (1,) * 101), "input"),
    ],
)
def test_what_can_never_run_is_refused_at_the_door(bad: Request, field: str) -> None:
    scheduler = make(max_queue_tokens=100)
    with pytest.raises(InvalidField) as caught:
        scheduler.add(bad, now=0.0)
    assert caught.value.field == field
    assert not scheduler.has_work()


def test_what_just_fits_the_memory_is_taken_and_ends() -> None:
    scheduler = make(blocks=3)
    full = request("r", (1,) * (BLOCK + 1), max_tokens=2 * BLOCK)
    full.stop_ids = frozenset()
    scheduler.add(full, now=0.0)
    run_all(scheduler)
    assert len(full.output) == 2 * BLOCK


def test_a_full_queue_says_when_to_come_back() -> None:
    scheduler = make(max_queue=2)
    for name in "ab":
        scheduler.add(request(name, (1,)), now=0.0)
    with pytest.raises(QueueFull, match="2 requests wait") as caught:
        scheduler.add(request("c", (1,)), now=0.0)
    assert caught.value.retry_after > 0


def test_too_many_prompt_tokens_in_the_queue_are_refused_too() -> None:
    scheduler = make(max_queue_tokens=50)
    scheduler.add(request("a", (1,) * 40), now=0.0)
    with pytest.raises(QueueFull, match="40 prompt tokens"):
        scheduler.add(request("b", (1,) * 11), now=0.0)


def test_an_expired_request_leaves_queue_and_running_without_another_row() -> None:
    scheduler, memory = make(max_seqs=1), Memory()
    scheduler.add(request("runs", (1, 2), max_tokens=50, deadline=1.0), now=0.0)
    scheduler.add(request("waits", (1, 2), deadline=1.0), now=0.0)
    run(scheduler, memory, now=0.5)
    plan = scheduler.schedule(now=1.0)
    assert plan.shares == []
    news = {update.request.id: type(update.fault) for update in scheduler.take_news()}
    assert news == {"runs": DeadlineExpired, "waits": DeadlineExpired}
    assert scheduler.pool.stats().held == 0


def test_a_deadline_sooner_than_the_predicted_wait_is_refused_at_once() -> None:
    scheduler, memory = make(blocks=40, max_rows=64), Memory()
    scheduler.add(request("measure", (1,) * 64), now=0.0)
    plan = scheduler.schedule(now=0.0)
    scheduler.complete(plan, [memory.run(share.work, share.request.tokens) for share in plan.shares], now=1.0)
    scheduler.add(request("ahead", (2,) * 192), now=1.0)
    with pytest.raises(DeadlineUnmeetable):
        scheduler.add(request("late", (3,) * 64, deadline=4.5), now=1.0)
    scheduler.add(request("in time", (3,) * 64, deadline=7.5), now=1.0)
    with pytest.raises(DeadlineExpired):
        scheduler.add(request("past", (3,), deadline=1.0), now=1.0)


def test_an_abort_during_a_step_frees_the_blocks_when_it_ends() -> None:
    scheduler, memory = make(), Memory()
    scheduler.add(request("r", (1, 2)), now=0.0)
    plan = scheduler.schedule(now=0.0)
    assert scheduler.abort("r")
    assert scheduler.pool.stats().held == 1
    assert scheduler.complete(plan, [memory.run(s.work, s.request.tokens) for s in plan.shares], now=0.1) == []
    assert scheduler.pool.stats().held == 0
    assert not scheduler.has_work()
    assert not scheduler.abort("r")


def test_a_failed_step_fails_its_requests_alone() -> None:
    scheduler = make(max_seqs=1)
    hit, spared = request("hit", (1, 2)), request("spared", (1, 2))
    for r in (hit, spared):
        scheduler.add(r, now=0.0)
    plan = scheduler.schedule(now=0.0)
    updates = scheduler.fail(plan, lambda r: EngineFault("TEST", r.id))
    assert [(update.request.id, str(update.fault)) for update in updates] == [("hit", "hit")]
    assert (hit.state, spared.state) == (State.FAILED, State.WAITING)
    run_all(scheduler)
    assert list(spared.output) == oracle(spared.prompt, spared.max_tokens)


def test_a_row_with_a_nan_fails_its_own_request_alone() -> None:
    scheduler, memory = make(), Memory()
    for name in "ab":
        scheduler.add(request(name, (1, 2)), now=0.0)
    plan = scheduler.schedule(now=0.0)
    good = memory.run(plan.shares[1].work, plan.shares[1].request.tokens)
    updates = scheduler.complete(plan, [SeqResult(False, "a NaN in layer 3", ()), good], now=0.1)
    assert isinstance(updates[0].fault, EngineFault)
    assert "layer 3" in str(updates[0].fault)
    assert updates[1].fault is None


def test_a_plan_must_be_handed_back_exactly_once() -> None:
    scheduler, memory = make(), Memory()
    scheduler.add(request("r", (1, 2)), now=0.0)
    plan = scheduler.schedule(now=0.0)
    with pytest.raises(RuntimeError, match="never handed back"):
        scheduler.schedule(now=0.0)
    scheduler.revert(plan)
    with pytest.raises(RuntimeError, match="not the one"):
        scheduler.complete(plan, [memory.run(s.work, s.request.tokens) for s in plan.shares], now=0.0)
    run_all(scheduler)


@pytest.mark.parametrize("field", ["max_rows", "max_seqs", "max_logit_rows", "max_queue", "max_queue_tokens"])
def test_limits_are_positive(field: str) -> None:
    good = {"max_rows": 4, "max_seqs": 2, "max_logit_rows": 2, "max_queue": 1, "max_queue_tokens": 1}
    with pytest.raises(ValueError, match=field):
        Limits(**(good | {field: 0}))


class Life(RuleBasedStateMachine):
    """Any order of arrivals, steps, failures, aborts and time: books balance, budgets hold, answers are right, and all of it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.memory, self.now = make(blocks=5), Memory(), 0.0
        self.plan: Plan | None = None
        self.live: dict[str, Request] = {}
        self.names = 0

    @rule(
        size=st.integers(1, 3 * BLOCK),
        kind=st.integers(0, 1),
        max_tokens=st.integers(1, 30),
        deadline=st.none() | st.floats(0.0, 2.0),
        what=st.sampled_from(["generate", "score", "trace"]),
        damping=st.sampled_from([None, None, HEAT, COLD]),
    )
    def add(self, size: int, kind: int, max_tokens: int, deadline: float | None, what: str, damping: Damping | None) -> None:
        self.names += 1
        prompt = tuple(kind * i % 3 for i in range(size))
        late = None if deadline is None else self.now + deadline
        how = {"deadline": late, "score": what == "score", "trace": what == "trace", "damping": damping}
        r = request(f"r{self.names}", prompt, max_tokens=max_tokens, **how)  # type: ignore[arg-type]
        try:
            self.scheduler.add(r, now=self.now)
        except Fault:
            assert r.id not in self.scheduler.requests
        else:
            self.live[r.id] = r

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        plan = self.scheduler.schedule(now=self.now)
        self.told(self.scheduler.take_news())
        assert plan.rows <= self.scheduler.limits.max_rows
        assert len(plan.shares) <= self.scheduler.limits.max_seqs
        assert sum(share.work.n_logits for share in plan.shares) <= self.scheduler.limits.max_logit_rows
        assert plan.shares or not self.scheduler.has_work()
        self.plan = plan if plan.shares else None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def complete(self) -> None:
        assert self.plan is not None
        results = self.memory.run_all(self.plan)
        plan, self.plan = self.plan, None
        self.told(self.scheduler.complete(plan, results, now=self.now))

    @precondition(lambda self: self.plan is not None)
    @rule(revert=st.booleans())
    def fail(self, revert: bool) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        if revert:
            self.scheduler.revert(plan)
        else:
            self.told(self.scheduler.fail(plan, lambda _: EngineFault("TEST", "injected")))

    @rule(refuse=st.booleans())
    def lose_everything_computed(self, refuse: bool) -> None:
        """In the midst of a step or between two."""
        plan, self.plan = self.plan, None
        if plan is not None:
            self.scheduler.revert(plan)
        self.memory = Memory()
        fault = EngineFault("TEST", "can't be had any more")
        self.told(self.scheduler.start_over(lambda r: fault if refuse and r.damping is not None else None))
        assert self.scheduler.pool.stats().free == self.scheduler.pool.total
        assert not (refuse and any(r.damping for r in self.live.values()))

    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        if self.live:
            name = sorted(self.live)[which % len(self.live)]
            assert self.scheduler.abort(name)
            del self.live[name]

    @rule(seconds=st.floats(0.0, 1.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def told(self, updates: list[Update]) -> None:
        for update in updates:
            r = update.request
            assert r.id in self.live
            if update.final:
                del self.live[r.id]
            if update.reason in (Reason.STOP, Reason.LENGTH):
                assert list(r.output) == oracle(r.prompt, r.max_tokens, damping=r.damping)
            if update.final:
                assert r.slot == -1 or r.in_flight
            if update.reason is not None:
                assert r.routed == (r.computed * LAYERS if r.damping is not None else 0)

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_integrity()
        assert set(self.scheduler.requests) == set(self.live)

    def teardown(self) -> None:
        if self.plan is not None:
            self.complete()
        for _ in range(3000):
            if not self.scheduler.has_work():
                break
            self.told(run(self.scheduler, self.memory, now=self.now))
        assert not self.live
        assert self.scheduler.pool.stats().held == 0
        self.scheduler.slots.check_integrity([])


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
