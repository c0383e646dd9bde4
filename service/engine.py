"""The thread that owns the session: asks the scheduler what to run, runs it, tells the event loop what came of it.

One lock guards the scheduler. The thread holds it between steps, never during one, so the loop can add and abort requests at any time and
gets a typed refusal at once. News of one step go to the loop early in the next, so that what the loop does with them and what lies between
two steps do not wait for each other; and not after every step while many requests run (service.outbox).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine_c import EngineError, LayersRemote, Remote, RemoteLost, SeqResult, SeqWork, StepStats
from service.faults import Draining, EngineFault, Fault, NodesLost, WorkersLost
from service.guests import Guests
from service.outbox import Outbox
from service.plan import Plan, SchedulerStats, Update
from service.request import Request
from service.scheduler import Scheduler

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logging.getLogger("colibri.service")
THREAD_NAME = "colibri-engine"  # as top -H shows it; 15 characters at most
_LANE_POLL = 0.02  # seconds between tries when nothing is left that computes
_GONE_BREAK = 0.5  # seconds without such a try after which the lanes count as gone anew
_IDLE_CHECK_AFTER = 1.0  # seconds of idling before the books are checked

_Result = TypeVar("_Result")


class Stepper(Protocol):
    """The part of engine_c.Session that the thread uses."""

    def step(self, work: Sequence[SeqWork], *, tell: int = -1, remote: Remote | None = None) -> tuple[list[SeqResult], StepStats]:
        """Runs one batch; EngineError if it could not be done. `tell`: an eventfd to be written to early in it. `remote`: who has the
        experts computed that set_remote named; its RemoteLost is passed on."""
        ...

    def set_remote(self, experts: npt.NDArray[np.bool_] | None, layers: Sequence[tuple[int, int]] = ()) -> None:
        """Which experts [layers, experts] are computed elsewhere, and which ranges [first, end) of layers whole."""
        ...


class Elsewhere(LayersRemote, Protocol):
    """Nodes that compute experts and layers (service.nodes)."""

    def prepare(self, session: Stepper) -> bool:
        """Before each step. True if keys and values of what was computed before are no more. RemoteLost if some experts or layers have
        nobody who computes them."""
        ...

    def refusal(self, request: Request) -> Fault | None:
        """Why a request can't be computed there; None: it can. Any thread."""
        ...


Deliver = Callable[[list[Update]], None]


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """What has been done since the start. Nanoseconds where the name says so."""

    steps: int = 0
    failed_steps: int = 0
    rows: int = 0
    step_ns: int = 0
    wait_ns: int = 0
    serial_ns: int = 0
    phases: int = 0
    tasks: int = 0
    tasks_rerun: int = 0
    lanes_lost: int = 0
    lanes: int = 0  # of the last step
    tasks_homed: int = 0  # tasks whose weights lie on a node of their own,
    tasks_local: int = 0  # and of these, those done by a lane of that node
    op_ns: tuple[int, ...] = ()  # by operation, in the order of engine_c.OPERATIONS


@dataclass(slots=True)
class Progress:
    """What health is judged by. Times are time.monotonic's."""

    alive: bool = False
    busy_since: float | None = None  # start of the step that runs, or of the wait for lanes
    lanes_gone: bool = False


class _NoLanes(Exception):
    """Nothing was left that computes for longer than the grace."""


class _NoNodes(Exception):
    """Nobody was left that has some experts for longer than the grace."""


class _KvGone(Exception):
    """The nodes' keys and values of what was computed are no more."""


class EngineThread:
    """Runs a session from `start` to `stop`. All other methods are for the loop's thread."""

    def __init__(
        self,
        session: Stepper,
        scheduler: Scheduler,
        *,
        lane_grace: float = 10.0,
        stream_interval: float | None = None,
        settle: Callable[[], object] = lambda: None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`lane_grace`: seconds to wait when nothing is left that computes; `stream_interval`: as Outbox has it; `settle` is called on the
        thread before its first step; `elsewhere`: nodes that compute experts or layers."""
        self._session = session
        self._scheduler = scheduler
        self._lane_grace = lane_grace
        self._settle = settle
        self._elsewhere = elsewhere
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._stopping = False
        self._draining = False
        self._at_boundary: list[Callable[[], object]] = []
        self._guests = Guests()
        self._idle = False  # waiting for work; changed under the lock
        self._totals = EngineTotals()
        self._gone_since = self._gone_seen = -math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Deliver | None = None
        self._outbox = Outbox(stream_interval)
        self._mail: deque[list[Update]] = deque()  # on its way: appended here, taken by the loop
        self._bell = -1  # eventfd that the loop watches
        self._step_seconds = 0.0  # what the last step took
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.progress = Progress()

    # ------------------------------------------------------------ the loop's side

    def start(self, loop: asyncio.AbstractEventLoop, deliver: Deliver) -> None:
        """Starts the thread. `deliver` is called on `loop`, with the news of some steps at once."""
        self._loop, self._deliver = loop, deliver
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.add_reader(self._bell, self._open_mail)
        self.progress.alive = True
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queues a request, or raises the Fault that says why not."""
        with self._wake:
            if self._draining or self._stopping:
                raise Draining
            if not self.progress.alive:
                raise EngineFault("ENGINE_STOPPED", "the engine has stopped; restart the server")
            fault = None if self._elsewhere is None else self._elsewhere.refusal(request)
            if fault is not None:
                raise fault
            self._scheduler.add(request, now=time.monotonic())
            self._wake.notify()

    def abort(self, request_id: str) -> bool:
        """Calls a request off; it is out of the next step, and its memory free when the one that runs ends. False if it has ended."""
        with self._wake:
            return self._scheduler.abort(request_id)

    async def boundary(self) -> None:
        """Returns once the thread stands between two steps, at once if none runs: what is submitted by then is in its next step."""
        loop, reached = asyncio.get_running_loop(), asyncio.Event()
        with self._wake:
            if not self.progress.alive:
                raise EngineFault("ENGINE_STOPPED", "the engine has stopped; restart the server")
            if self._idle:  # it waits for work right now
                return
            self._at_boundary.append(lambda: loop.call_soon_threadsafe(reached.set))
            self._wake.notify()
        await reached.wait()

    async def between(self, work: Callable[[], _Result]) -> _Result:
        """Runs `work` on the thread between two steps, one such piece before each; not at all if the caller is cancelled before its turn.
        Raises what it raises, and the Fault that says why it can't be run."""
        answer = self._guests.add(work)
        with self._wake:
            self._wake.notify()
        return await asyncio.wrap_future(answer)

    def drain(self) -> None:
        """Takes no new requests from now on."""
        with self._wake:
            self._draining = True

    def stop(self, timeout: float = 60.0) -> bool:
        """Ends the thread when the step that runs is done; requests still there get no more news. False if it did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def stats(self) -> tuple[SchedulerStats, EngineTotals]:
        """A snapshot."""
        with self._lock:
            return self._scheduler.stats(), self._totals

    @property
    def steps(self) -> int:
        """Done so far; does not wait for anybody."""
        return self._totals.steps

    @property
    def thread_id(self) -> int | None:
        """The system's number of the thread, once it runs."""
        return self._thread.native_id

    def check_integrity(self) -> None:
        """Raises if the scheduler's books do not balance."""
        with self._lock:
            self._scheduler.check_integrity()

    def _open_mail(self) -> None:
        assert self._deliver is not None
        os.eventfd_read(self._bell)
        while self._mail:
            self._deliver(self._mail.popleft())

    def _hang_up(self) -> None:
        """The thread has ended: what it sent last is delivered, and nothing is watched any more."""
        assert self._loop is not None
        self._loop.remove_reader(self._bell)
        os.eventfd_write(self._bell, 1)
        self._open_mail()
        os.close(self._bell)

    # ------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        _name_thread(THREAD_NAME)
        self._settle()
        try:
            while (plan := self._next_plan()) is not None:
                self._outbox.put(self._step(plan), now=time.monotonic(), running=len(plan.shares))
            self._post(self._outbox.take_all())
        except BaseException:
            log.exception("the engine thread failed; nothing more can be served")
            self._fail_all()
            raise
        finally:
            self.progress.alive = False
            self._guests.close(EngineFault("ENGINE_STOPPED", "the engine has stopped; restart the server"))
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._hang_up)

    def _next_plan(self) -> Plan | None:
        """The next step to run, waiting for one; None when it is time to stop. News that came without a step are sent on the way."""
        while True:
            self._run_guest()
            with self._wake:
                self._wait_for_work()
                if self._stopping:
                    return None
                if not self._scheduler.has_work():  # but a guest is here
                    continue
                plan = self._scheduler.schedule(now=time.monotonic())
                news = self._scheduler.take_news()
            self._outbox.put(news, now=plan.at, running=len(plan.shares))
            if plan.shares:
                return plan
            if not news:
                raise RuntimeError("there is work, yet none of it can run")
            self._post(self._outbox.take_all())

    def _run_guest(self) -> None:
        """Without the lock: requests come and go meanwhile, as they do during a step."""
        if not self._guests:
            return
        self._post(self._outbox.take_all())
        self.progress.busy_since = time.monotonic()
        self._guests.run_one()
        self.progress.busy_since = None

    def _wait_for_work(self) -> None:
        """Sleeps until there is work. A while into idling the books are checked, once: they are small then and nobody waits."""
        timeout: float | None = _IDLE_CHECK_AFTER
        while True:
            waiting, self._at_boundary = self._at_boundary, []
            for tell in waiting:
                with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                    tell()
            if self._scheduler.has_work() or self._stopping or self._guests:
                return
            self._post(self._outbox.take_all())
            self._idle = True
            woken = self._wake.wait(timeout)
            self._idle = False
            if not woken and timeout is not None:
                self._scheduler.check_integrity()
                timeout = None

    def _step(self, plan: Plan) -> list[Update]:
        self.progress.busy_since = time.monotonic()
        try:
            results, stats = self._step_with_lanes(plan)
        except (_NoLanes, _NoNodes) as gone:
            kind, sentence = WorkersLost if isinstance(gone, _NoLanes) else NodesLost, str(gone)
            return self._failed(plan, lambda request: kind(ran=request.ran, sentence=sentence))
        except _KvGone:
            return self._start_over(plan)
        except Exception as error:
            log.exception("a step of %d rows failed", plan.rows)
            fault = _engine_fault(error)
            return self._failed(plan, lambda _: fault)
        finally:
            self.progress.busy_since = None
        now = time.monotonic()
        self._step_seconds = now - plan.at
        with self._lock:
            self._totals = _add(self._totals, plan, stats)
            return self._scheduler.complete(plan, results, now=now)

    def _step_with_lanes(self, plan: Plan) -> tuple[list[SeqResult], StepStats]:
        """A step is a transaction: when nothing is left that computes it is tried again until a worker or node is back or time is up.

        The time counts from when the lanes went, not anew for every step: who waits in the queue does not wait one grace after the other.
        """
        tell = self._prepare_mail(plan)
        while True:
            try:
                result = self._try_step(plan, tell)
                self.progress.lanes_gone = False
                return result
            except EngineError as error:
                if error.name != "ENOLANES":
                    raise
                self._wait_for_help(_NoLanes(str(error)))
            except RemoteLost as lost:
                self._wait_for_help(_NoNodes(str(lost)))

    def _try_step(self, plan: Plan, tell: int) -> tuple[list[SeqResult], StepStats]:
        if self._elsewhere is None:
            return self._session.step(plan.work, tell=tell)
        if self._elsewhere.prepare(self._session):
            raise _KvGone
        return self._session.step(plan.work, tell=tell, remote=self._elsewhere)

    def _start_over(self, plan: Plan) -> list[Update]:
        """The step is dropped, and all requests begin anew, but those that can't be computed any more."""
        assert self._elsewhere is not None
        self.progress.lanes_gone = False
        with self._lock:
            self._scheduler.revert(plan)
            return self._scheduler.start_over(self._elsewhere.refusal)

    def _wait_for_help(self, gone: _NoLanes | _NoNodes) -> None:
        """Until the next try; raises `gone` when time is up."""
        self._post(self._outbox.take_all())
        self.progress.lanes_gone = True
        seconds = self._gone_for(time.monotonic())
        with self._wake:
            if self._stopping or seconds >= self._lane_grace:
                raise gone
            self._wake.wait(_LANE_POLL)

    def _gone_for(self, now: float) -> float:
        """Seconds that steps have found no lane, as far as that was seen without a break."""
        if now - self._gone_seen > _GONE_BREAK:
            self._gone_since = now
        self._gone_seen = now
        return now - self._gone_since

    def _failed(self, plan: Plan, fault_of: Callable[[Request], Fault]) -> list[Update]:
        with self._lock:
            self._totals = replace(self._totals, failed_steps=self._totals.failed_steps + 1)
            return self._scheduler.fail(plan, fault_of)

    def _fail_all(self) -> None:
        """The thread is on its way out: everyone who waits hears of it."""
        fault = EngineFault("ENGINE_STOPPED", "the engine failed; its log says why")
        with self._lock:
            requests = list(self._scheduler.requests.values())
        self._post([*self._outbox.take_all(), *[Update(request, fault=fault) for request in requests]])

    def _prepare_mail(self, plan: Plan) -> int:
        """Puts into the mail what can't wait for the end of this step. The bell to ring early in it, or -1."""
        prefills = plan.rows > len(plan.shares)  # may take any time
        due = self._outbox.take(now=plan.at, next_in=math.inf if prefills else self._step_seconds)
        if not due:
            return -1
        self._mail.append(due)
        return self._bell

    def _post(self, updates: list[Update]) -> None:
        """Sends at once."""
        if updates:
            self._mail.append(updates)
            os.eventfd_write(self._bell, 1)


def _name_thread(name: str) -> None:
    """Names the calling thread for the operating system."""
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name, encoding="ascii")


def _engine_fault(error: Exception) -> EngineFault:
    reason = f"ENGINE_{error.name}" if isinstance(error, EngineError) else "ENGINE_BUG"
    return EngineFault(reason, f"the engine could not do a step: {error}")


def _add(totals: EngineTotals, plan: Plan, stats: StepStats) -> EngineTotals:
    return EngineTotals(
        steps=totals.steps + 1,
        failed_steps=totals.failed_steps,
        rows=totals.rows + plan.rows,
        step_ns=totals.step_ns + stats.step_ns,
        wait_ns=totals.wait_ns + stats.wait_ns,
        serial_ns=totals.serial_ns + stats.serial_ns,
        phases=totals.phases + stats.phases,
        tasks=totals.tasks + stats.tasks,
        tasks_rerun=totals.tasks_rerun + stats.tasks_rerun,
        lanes_lost=totals.lanes_lost + stats.lanes_lost,
        lanes=stats.lanes,
        tasks_homed=totals.tasks_homed + stats.tasks_homed,
        tasks_local=totals.tasks_local + stats.tasks_local,
        op_ns=tuple(map(add, totals.op_ns, stats.op_ns)) if totals.op_ns else stats.op_ns,
    )
