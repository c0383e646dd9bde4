"""The scheduler against a model of the engine: a KV memory that knows what it should hold, and an oracle for every answer."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_c import GREEDY, RowResult, SeqResult, SeqWork
from service.blocks import BLOCK, BlockPool, blocks_for
from service.faults import DeadlineExpired, DeadlineUnmeetable, EngineFault, Fault, InvalidField, QueueFull
from service.plan import Limits, Plan, Update
from service.request import Reason, Request, State
from service.scheduler import Scheduler

VOCAB = 40
STOP_TOKEN = 39


def next_token(tokens: tuple[int, ...]) -> int:
    """What the model of the engine samples behind these tokens."""
    return hash(tokens) % VOCAB


def oracle(prompt: tuple[int, ...], max_tokens: int, *, stop: int = STOP_TOKEN) -> list[int]:
    """The answer of a request that runs alone."""
    output: list[int] = []
    while len(output) < max_tokens and (not output or output[-1] != stop):
        output.append(next_token((*prompt, *output)))
    return output


class Memory:
    """KV memory that checks itself: every position must hold the key of exactly its own prefix when it is attended to."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], int] = {}

    def run(self, work: SeqWork, tokens: list[int]) -> SeqResult:
        end = work.start + len(work.tokens)
        assert list(work.tokens) == tokens[work.start : end]
        assert len(work.blocks) >= blocks_for(end)
        for position in range(work.start, end):
            self._slots[work.blocks[position // BLOCK], position % BLOCK] = hash(tuple(tokens[: position + 1]))
        for position in range(end):
            assert self._slots[work.blocks[position // BLOCK], position % BLOCK] == hash(tuple(tokens[: position + 1]))
        targets = work.targets or [-1] * work.n_logits
        first = end - work.n_logits + 1
        rows = [RowResult(next_token(tuple(tokens[: first + i])), -1.0, -float(t), 0, ()) for i, t in enumerate(targets)]
        return SeqResult(True, "", tuple(rows))


def make(*, blocks: int = 8, max_rows: int = 12, max_seqs: int = 4, max_queue: int = 6, max_queue_tokens: int = 400) -> Scheduler:
    limits = Limits(
        max_rows=max_rows, max_seqs=max_seqs, max_logit_rows=max_seqs + 1, max_queue=max_queue, max_queue_tokens=max_queue_tokens
    )
    return Scheduler(limits, BlockPool(blocks))


def request(name: str, prompt: tuple[int, ...], *, max_tokens: int = 4, deadline: float | None = None, score: bool = False) -> Request:
    return Request(name, prompt, GREEDY, max_tokens, frozenset({STOP_TOKEN}), deadline, score)


def run(scheduler: Scheduler, memory: Memory, *, now: float) -> list[Update]:
    plan = scheduler.schedule(now=now)
    news = scheduler.take_news()
    if not plan.shares:
        return news
    results = [memory.run(share.work, share.request.tokens) for share in plan.shares]
    return news + scheduler.complete(plan, results, now=now + 0.01)


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
        score=st.booleans(),
    )
    def add(self, size: int, kind: int, max_tokens: int, deadline: float | None, score: bool) -> None:
        self.names += 1
        prompt = tuple(kind * i % 3 for i in range(size))
        r = request(
            f"r{self.names}", prompt, max_tokens=max_tokens, deadline=None if deadline is None else self.now + deadline, score=score
        )
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
        results = [self.memory.run(share.work, share.request.tokens) for share in self.plan.shares]
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
                assert list(r.output) == oracle(r.prompt, r.max_tokens)

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


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
