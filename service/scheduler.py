"""Which tokens of which requests go into the next step. Pure: no threads, no clocks; time is passed in, in seconds.

Continuous batching: every step runs one token of each decoding request, then chunks of prefills in order of arrival, then admits waiting
requests, within the step's budgets of sequences, rows and rows with logits. A request gets the KV blocks of all its tokens when admitted,
and one more each time it grows past them. When blocks run out the youngest gives all of its own back and is recomputed later.
A running request also has a slot for the engine's routing state; one that is recomputed begins with a fresh one.

Nothing deadlocks: `add` refuses what could not run alone, the oldest running request can take blocks from every other, and the oldest
waiting one is admitted as soon as the running ones have left.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from engine_c import RowResult, SeqResult, SeqWork
from service.admission import Queue, check_deadline, check_fits, check_queue
from service.blocks import BLOCK, BlockPool, IntegrityError, Table, blocks_for
from service.faults import DeadlineExpired, EngineFault, Fault
from service.plan import Limits, Plan, SchedulerStats, Share, Update
from service.request import LIVE, Reason, Request, State
from service.slots import NONE, Slots

_RATE_WEIGHT = 0.2  # of the newest step in the moving average of the prefill rate
_RATE_ROWS = 16  # steps with fewer prefill rows say little about the rate
_LEAST_CHUNK = 32  # prefill rows of a step, however slow the machine


@dataclass(slots=True)
class _Budget:
    rows: int
    seqs: int
    logits: int

    def spend(self, work: SeqWork) -> None:
        self.rows -= len(work.tokens)
        self.seqs -= 1
        self.logits -= work.n_logits


@dataclass(slots=True)
class Scheduler:
    """The requests of one session. Not thread-safe: its owner locks."""

    limits: Limits
    pool: BlockPool
    running: list[Request] = field(default_factory=list)  # oldest first
    waiting: list[Request] = field(default_factory=list)  # oldest first
    requests: dict[str, Request] = field(default_factory=dict)
    preemptions: int = 0
    prefill_rate: float = 0.0
    rerouted_pairs: int = 0
    damped_pairs: int = 0
    slots: Slots = field(init=False)
    _orders: count[int] = field(default_factory=count)
    _news: list[Update] = field(default_factory=list)
    _flying: Plan | None = None

    def __post_init__(self) -> None:
        self.slots = Slots(self.limits.max_slots)

    # ------------------------------------------------------------ requests in and out

    def add(self, request: Request, *, now: float) -> None:
        """Queues a request. Raises the Fault that says why not: InvalidField, QueueFull, DeadlineUnmeetable, DeadlineExpired."""
        queue = self._queue()
        check_fits(request, limits=self.limits, blocks=self.pool.total)
        check_queue(request, limits=self.limits, queue=queue)
        check_deadline(request, queue=queue, now=now)
        if request.id in self.requests:
            raise ValueError(f"request {request.id} is already here")
        request.order, request.arrived = next(self._orders), now
        self.requests[request.id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Calls a request off; False if it is not here. Its blocks are back at once, or if a step runs with it, when that ends."""
        request = self.requests.get(request_id)
        if request is None or request.state not in LIVE:
            return False
        self._leave(request, State.ABORTED)
        return True

    def has_work(self) -> bool:
        """Whether schedule would have anything to do."""
        return bool(self.running or self.waiting or self._news)

    def backlog(self) -> int:
        """Prompt rows that have to run before a request added now."""
        return sum(r.pending for r in self.waiting) + sum(r.pending for r in self.running if r.state is State.PREFILL)

    def _queue(self) -> Queue:
        tokens, busy = sum(len(r.prompt) for r in self.waiting), bool(self.waiting or self.running)
        return Queue(requests=len(self.waiting), tokens=tokens, rows=self.backlog(), rate=self.prefill_rate, busy=busy)

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        tokens = sum(len(r.prompt) for r in self.waiting)
        counts = len(self.running), len(self.waiting), tokens, self.preemptions
        return SchedulerStats(*counts, self.prefill_rate, self.pool.stats(), self.rerouted_pairs, self.damped_pairs)

    # ------------------------------------------------------------ steps

    def schedule(self, *, now: float) -> Plan:
        """The next step, empty if nothing can run. Requests past their deadline are failed; take_news tells of them."""
        if self._flying is not None:
            raise RuntimeError("the last plan was never handed back")
        self._expire(now)
        budget = _Budget(self.limits.max_rows, self.limits.max_seqs, self.limits.max_logit_rows)
        chosen: dict[str, Share] = {}
        for request in [r for r in self.running if r.state is State.DECODE]:
            self._schedule_decode(request, budget, chosen)
        if chosen:
            budget.rows = min(budget.rows, self._prefill_rows())
        for request in [r for r in self.running if r.state is State.PREFILL]:
            self._schedule_prefill(request, budget, chosen)
        while self.waiting and self._can_admit(self.waiting[0], budget):
            self._schedule_prefill(self._admit(now), budget, chosen)
        for share in chosen.values():
            share.request.in_flight = True
        plan = Plan(list(chosen.values()), now)
        self._flying = plan if plan.shares else None
        return plan

    def take_news(self) -> list[Update]:
        """What happened to requests outside of steps since the last call."""
        news, self._news = self._news, []
        return news

    def complete(self, plan: Plan, results: Sequence[SeqResult], *, now: float) -> list[Update]:
        """Takes in what a step gave, one result a share."""
        self._land(plan)
        self._observe(plan, now)
        updates = [self._take_in(share, result, now) for share, result in zip(plan.shares, results, strict=True)]
        return [update for update in updates if update is not None]

    def fail(self, plan: Plan, fault_of: Callable[[Request], Fault]) -> list[Update]:
        """A step could not be done: its requests fail, each with its own fault; all others go on."""
        self._land(plan)
        updates = []
        for share in plan.shares:
            if share.request.state in LIVE:
                self._leave(share.request, State.FAILED)
                updates.append(Update(share.request, fault=fault_of(share.request)))
            else:
                self._release(share.request)
        return updates

    def revert(self, plan: Plan) -> None:
        """A step did not happen; its requests stand where they stood."""
        self._land(plan)
        for share in plan.shares:
            if share.request.state not in LIVE:
                self._release(share.request)

    def start_over(self, refusal: Callable[[Request], Fault | None]) -> list[Update]:
        """Keys and values are no more, of anybody: who runs waits and is recomputed, no prefix is known. Who is refused fails. Between
        steps."""
        for request in reversed(self.running.copy()):
            self._preempt(request)
        self.pool.forget()
        updates = []
        for request in list(self.requests.values()):
            fault = refusal(request)
            if fault is not None:
                self._leave(request, State.FAILED)
                updates.append(Update(request, fault=fault))
        return updates

    def check_integrity(self) -> None:
        """Raises IntegrityError unless lists, states and the accounts of blocks and slots agree."""
        flying = [share.request for share in self._flying.shares] if self._flying else []
        held = {id(request): request for request in [*self.running, *flying]}.values()
        self.pool.check_integrity(request.table for request in held)
        self.slots.check_integrity(request.slot for request in held if request.slot != NONE)
        astray = [r for r in self.running if r.state not in (State.PREFILL, State.DECODE)]
        astray += [r for r in self.waiting if r.state is not State.WAITING]
        if astray:
            raise IntegrityError("a request is in a list its state does not allow")
        if sorted(self.requests) != sorted(r.id for r in [*self.running, *self.waiting]):
            raise IntegrityError("a live request is in no list, or in two")
        if any(r.table.blocks or r.slot != NONE for r in self.waiting) or any(r.computed > r.table.room for r in self.running):
            raise IntegrityError("a waiting request holds KV blocks or a slot, or a running one too few blocks")
        for requests in (self.running, self.waiting):
            if [r.order for r in requests] != sorted(r.order for r in requests):
                raise IntegrityError("requests are out of order")

    # ------------------------------------------------------------ admission

    def _can_admit(self, request: Request, budget: _Budget) -> bool:
        if budget.rows < 1 or budget.seqs < 1 or budget.logits < 1 or len(self.running) >= self.limits.max_seqs:
            return False
        shared = self._shared(request)
        wanted = blocks_for(request.computed + request.pending) - len(shared.blocks)
        return self.pool.can_take(wanted, shared=shared, spare=len(self.running))  # each running request may soon grow by a block

    def _admit(self, now: float) -> Request:
        request = self.waiting.pop(0)
        shared = self._shared(request)
        request.table = self.pool.take(blocks_for(request.pending) - len(shared.blocks), shared=shared)
        request.slot = self.slots.take()
        hit = request.computed = len(shared.blocks) * BLOCK
        if request.started is None:
            request.started, request.cached = now, hit
            if self._looks_up(request):
                self.pool.count_lookup(queried=len(request.prompt), hit=hit)
        request.move(State.PREFILL)
        insort(self.running, request, key=lambda r: r.order)
        return request

    def _shared(self, request: Request) -> Table:
        return self.pool.lookup(request.tokens) if self._looks_up(request) else Table()

    @staticmethod
    def _looks_up(request: Request) -> bool:
        """A score wants every row's logits and a trace every row's experts, so they reuse nothing."""
        return request.shares_prefix and not request.score and not request.trace

    # ------------------------------------------------------------ shares of a step

    def _schedule_decode(self, request: Request, budget: _Budget, chosen: dict[str, Share]) -> None:
        if request.state is not State.DECODE:
            return  # preempted by an older one in this very pass
        if len(request.tokens) > request.table.room:
            if not self._make_room(request, budget, chosen):
                return
            self.pool.grow(request.table)
        tokens = request.tokens
        history = tokens if request.sampling.repetition_penalty != 1.0 else ()
        blocks, damping = request.table.blocks, request.damping
        work = SeqWork((tokens[-1],), request.computed, blocks, 1, request.sampling, history, None, damping, request.slot)
        budget.rows -= 1
        budget.seqs -= 1
        budget.logits -= 1
        chosen[request.id] = Share(request, work)

    def _schedule_prefill(self, request: Request, budget: _Budget, chosen: dict[str, Share]) -> None:
        if request.state is not State.PREFILL or budget.rows < 1 or budget.seqs < 1:
            return
        rows = min(request.pending, budget.rows)
        if request.trace:
            logits = 0
        elif request.score:
            rows = min(rows, budget.logits)
            logits = rows
        else:
            logits = 1 if rows == request.pending else 0
        if logits > budget.logits:
            rows, logits = rows - 1, 0
        if rows > 0:
            self._choose(request, rows, logits, budget, chosen)

    def _choose(self, request: Request, rows: int, logits: int, budget: _Budget, chosen: dict[str, Share]) -> None:
        start, end = request.computed, request.computed + rows
        history = request.tokens if logits and not request.score and request.sampling.repetition_penalty != 1.0 else ()
        targets = request.tokens[start + 1 : end + 1] if request.score else None
        routing = request.damping, request.slot, request.trace
        work = SeqWork(request.tokens[start:end], start, request.table.blocks, logits, request.sampling, history, targets, *routing)
        budget.spend(work)
        chosen[request.id] = Share(request, work)

    def _make_room(self, request: Request, budget: _Budget, chosen: dict[str, Share]) -> bool:
        """Frees a block by preempting requests younger than this one; False if there is none, and this one sits the step out."""
        while not self.pool.can_grow():
            victim = self.running[-1]
            if victim.order <= request.order:
                return False
            share = chosen.pop(victim.id, None)
            if share is not None:
                budget.rows += len(share.work.tokens)
                budget.seqs += 1
                budget.logits += share.work.n_logits
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        request.move(State.WAITING)
        self.running.remove(request)
        self._release(request)
        request.computed = request.rerouted = request.routed = 0
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=lambda r: r.order)

    # ------------------------------------------------------------ results

    def _land(self, plan: Plan) -> None:
        if plan is not self._flying:
            raise RuntimeError("this plan is not the one that runs")
        self._flying = None
        for share in plan.shares:
            share.request.in_flight = False

    def _take_in(self, share: Share, result: SeqResult, now: float) -> Update | None:
        request, work = share.request, share.work
        if request.state not in LIVE:
            self._release(request)
            return None
        if not result.ok:
            self._leave(request, State.FAILED)
            return Update(request, fault=EngineFault("NUMERIC", result.error))
        request.computed += len(work.tokens)
        if request.damping is not None:
            self._count_rerouted(request, rows=len(work.tokens), rerouted=result.rerouted)
        elif request.computed // BLOCK > len(request.table.chain):
            self.pool.publish(request.table, request.tokens, computed=request.computed)
        reason = self._advance(request, result.rows, now)
        if reason is not None:
            self._leave(request, State.FINISHED)
        if not result.rows and result.routes is None:
            return None
        return Update(request, result.rows, reason, None, result.routes, work.start)

    def _count_rerouted(self, request: Request, *, rows: int, rerouted: int) -> None:
        routed = rows * self.limits.router_layers
        request.rerouted += rerouted
        request.routed += routed
        self.rerouted_pairs += rerouted
        self.damped_pairs += routed

    def _advance(self, request: Request, rows: Sequence[RowResult], now: float) -> Reason | None:
        if request.score:
            return Reason.SCORED if request.pending == 0 else None
        if request.trace:
            return Reason.ROUTED if request.pending == 0 else None
        if not rows:
            return None
        token = rows[0].token
        request.tokens.append(token)
        request.first_token = now if request.first_token is None else request.first_token
        request.last_token = now
        if request.state is State.PREFILL:
            request.move(State.DECODE)
        if token in request.stop_ids:
            return Reason.STOP
        return Reason.LENGTH if len(request.tokens) - len(request.prompt) >= request.max_tokens else None

    def _prefill_rows(self) -> int:
        """Prefill rows of a step that also decodes: as many as the answers under way can be kept waiting for."""
        if self.limits.prefill_seconds <= 0 or self.prefill_rate <= 0:
            return self.limits.max_rows
        return max(_LEAST_CHUNK, int(self.prefill_rate * self.limits.prefill_seconds))

    def _observe(self, plan: Plan, now: float) -> None:
        """Keeps a moving average of the rows a second of steps that prefill."""
        rows = plan.rows
        if now > plan.at and rows - len(plan.shares) >= _RATE_ROWS:
            rate = rows / (now - plan.at)
            self.prefill_rate = rate if self.prefill_rate == 0 else self.prefill_rate + _RATE_WEIGHT * (rate - self.prefill_rate)

    def _expire(self, now: float) -> None:
        for request in self._expired(self.requests.values(), now):
            self._leave(request, State.FAILED)
            self._news.append(Update(request, fault=DeadlineExpired()))

    @staticmethod
    def _expired(requests: Iterable[Request], now: float) -> list[Request]:
        return [r for r in requests if r.deadline is not None and r.deadline <= now]

    def _leave(self, request: Request, state: State) -> None:
        """Out of all lists. The blocks and the slot of a request whose step still runs stay its own until that lands."""
        (self.waiting if request.state is State.WAITING else self.running).remove(request)
        request.move(state)
        del self.requests[request.id]
        if not request.in_flight:
            self._release(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.table)
        self.slots.give(request.slot)
        request.slot = NONE
