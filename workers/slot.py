"""A place for a worker: brings its process to life, watches, drains and buries it. Runs on the supervisor's thread, under its lock."""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_c import LANE_ACTIVE, LANE_READY, EngineError, Part, Session
from workers.cgroup import OomWatch
from workers.lifecycle import Lifecycle, RestartPolicy, State
from workers.plan import WorkerSpec
from workers.process import Message, WorkerProcess, curable, describe_end
from workers.segments import ModelImage

log = logging.getLogger("colibri.workers")

ATTACH_POLL_S = 0.002
"""Between a worker's "ready" and the last of its lanes attaching: a few of these."""
LEAVE_POLL_S = 0.05
"""A draining worker's lanes are asked again this often."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Deadlines in seconds."""

    start_s: float = 10.0
    """A worker that has not acknowledged by then is killed."""
    drain_s: float = 5.0
    """From asking a worker's lanes to leave (a step may be running) to SIGTERM."""
    term_s: float = 1.0
    """From SIGTERM to SIGKILL."""
    stop_s: float = 0.05
    """A worker that is stopped (SIGSTOP) that long is killed. A lane that hangs in a task, stopped or not, is killed by the step that waits
    for it (hang_ms)."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker now. last_end says how its last process ended, degraded what the machine refused it."""

    index: int
    node: int
    state: State
    pid: int | None
    lanes: tuple[int, ...]
    cpus: tuple[int, ...]
    tasks: int
    restarts: int
    in_state_s: float
    last_end: str
    error: str
    degraded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all slots of a supervisor share."""

    session: Session
    image: ModelImage
    config: SupervisorConfig
    selector: selectors.BaseSelector
    oom: OomWatch
    wake: Callable[[], None]
    """Makes the supervisor's thread converge soon; from any thread."""
    taken: set[int] = field(default_factory=set)
    """Lanes of processes that have not ended."""
    told: set[str] = field(default_factory=set)
    """What workers were refused and the log has said: the next one is refused the same."""


class Slot:
    """One worker's life and, while there is one, its process. converge() does what is due; the selector calls the on_* methods."""

    def __init__(self, spec: WorkerSpec, around: Surroundings, now: float) -> None:
        self.spec = spec
        self.life = Lifecycle(around.config.policy, now)
        self.last_end = ""
        self._around = around
        self._session = around.session
        self._config = around.config
        self._process: WorkerProcess | None = None
        self._said_ready = False
        self._told = self._followed = 0  # records of parts that its process was sent, and has answered
        self.missed = False  # its process could not be told of a part, or not map it
        self._degraded: tuple[str, ...] = ()
        self._deadline = 0.0  # of the present stage of starting or draining
        self._stopped_at: float | None = None
        self._termed = False
        self._killed_for = ""
        self._complaint = ""
        self._tail: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.spec.index} (NUMA node {self.spec.node})"

    def obituary(self) -> str:
        """Who, what is wrong, and the last words."""
        tail = self._tail if self._process is None else tuple(self._process.tail)
        words = "; it last printed:\n  " + "\n  ".join(tail[-5:]) if tail else ""
        return f"{self.name} {self.life.error or 'is ' + self.life.state.value}{words}"

    def snapshot(self, now: float) -> WorkerSnapshot:
        """What there is now."""
        return WorkerSnapshot(
            index=self.spec.index,
            node=self.spec.node,
            state=self.life.state,
            pid=None if self._process is None else self._process.pid,
            lanes=self.spec.lanes,
            cpus=self.spec.cpus,
            tasks=sum(self._session.lane_tasks(lane) for lane in self.spec.lanes),
            restarts=self.life.restarts,
            in_state_s=now - self.life.since,
            last_end=self.last_end,
            error=self.life.error,
            degraded=self._degraded,
        )

    def converge(self, now: float, *, wanted: bool) -> float | None:
        """Does what is due. Returns when to look again, None if only an event will change anything."""
        match self.life.state:
            case State.STARTING | State.READY if not wanted:
                return self._drain(now)
            case State.STARTING:
                return self._watch_start(now)
            case State.READY:
                return self._look(now)
            case State.DRAINING:
                return self._watch_drain(now)
            case State.BACKOFF | State.FAILED if wanted and not self.life.may_start(now):
                return self.life.retry_at if math.isfinite(self.life.retry_at) else None
        return self._spawn(now) if wanted and self.life.may_start(now) else None

    # ---------------------------------------------------------------- stages

    def _spawn(self, now: float) -> float | None:
        # A worker that leaves these lanes has them until its process has ended: that end, which is an event, clears them.
        if not self._around.taken.isdisjoint(self.spec.lanes):
            return None
        self._around.taken.update(self.spec.lanes)
        self.life.started(now)
        self._said_ready = self._termed = False
        self._told = self._followed = 0
        self.missed = False
        self._stopped_at = None
        self._killed_for = self._complaint = ""
        self._deadline = now + self._config.start_s
        session = self._session
        try:
            process = WorkerProcess(self.spec, image=self._around.image, team_fd=session.team_fd, arena_fd=session.arena_fd)
        except OSError as refusal:
            self._ended(0, f"could not be started: {refusal}", again=True)
            return now
        self._process = process
        self._around.selector.register(process.pidfd, selectors.EVENT_READ, self.on_end)
        self._around.selector.register(process.control, selectors.EVENT_READ, self.on_control)
        self._around.selector.register(process.output, selectors.EVENT_READ, self.on_output)
        try:
            for lane in self.spec.lanes:
                session.lane_place(lane, self.spec.node)
                session.lane_bind(lane, pid=process.pid, pidfd=process.pidfd)
        except EngineError as refusal:
            self._kill(f"its lanes could not be bound: {refusal}")
        else:
            process.go()
        process.watch_stops(self._around.wake)
        return self._deadline

    def _watch_start(self, now: float) -> float | None:
        if self._said_ready and all(self._session.lane_state(lane) in (LANE_READY, LANE_ACTIVE) for lane in self.spec.lanes):
            self.life.acknowledged(now)
            refused = "".join(f"; refused: {text}" for text in self._degraded if text not in self._around.told)
            self._around.told.update(self._degraded)
            log.info("%s, pid %d, is ready%s", self.name, self._process.pid if self._process else 0, refused)
            return self._look(now)
        if now >= self._deadline:
            self._kill(f"it did not become ready within {self._config.start_s:g} s")
            return now + self._config.term_s
        again = self._look(now)
        if self._said_ready:
            return now + ATTACH_POLL_S
        return self._deadline if again is None else min(self._deadline, again)

    def _look(self, now: float) -> float | None:
        """Kills a process that has been stopped for too long. Returns when to look again, None if an event will tell."""
        process = self._process
        if process is None or not process.stop_told:
            return None
        if not process.stopped():  # it was told to go on
            self._stopped_at = None
            process.watch_stops(self._around.wake)
            return None
        if self._stopped_at is None:
            self._stopped_at = now
        if now < self._stopped_at + self._config.stop_s:
            return self._stopped_at + self._config.stop_s
        self._kill("it was stopped")
        return None

    def _drain(self, now: float) -> float:
        starting = self.life.state is State.STARTING
        self.life.drain(now)
        # A worker that has not attached yet has nothing to finish.
        self._deadline = now if starting else now + self._config.drain_s
        return self._watch_drain(now)

    def _watch_drain(self, now: float) -> float:
        if self._process is not None and self._process.stopped():
            self._kill("it was stopped")
        elif now < self._deadline:
            for lane in self.spec.lanes:
                self._session.lane_leave(lane)
            return min(self._deadline, now + LEAVE_POLL_S)
        elif self._termed:
            self._kill("it did not leave when asked to")
        elif self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._termed = True
        self._deadline = now + self._config.term_s
        return self._deadline

    def _kill(self, why: str) -> None:
        self._killed_for = why
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    # ---------------------------------------------------------------- events

    def on_control(self) -> None:
        """The worker said something."""
        if self._process is None:
            return
        messages, more = self._process.read_control()
        for message in messages:
            self._heard(message)
        if not more:
            self._unwatch(self._process.control.fileno())

    def tell(self, parts: Sequence[Part]) -> None:
        """Has the process, if there is one, map parts from elsewhere. One that starts later finds them in its table."""
        for part in parts:
            if self._process is None:
                continue
            if self._process.send_part(part):
                self._told += 1
            else:
                self.missed = True

    @property
    def behind(self) -> bool:
        """Whether its process has yet to follow what it was told."""
        return self._process is not None and self._followed < self._told

    def _heard(self, message: Message) -> None:
        if message.mapped:
            self._followed = message.mapped
            if message.unmapped:
                self.missed = True
                log.warning("%s could not map a copy of an expert, so it goes on reading the first: %s", self.name, message.unmapped)
            return
        self._complaint = message.error
        self._said_ready = message.ready
        self._degraded = message.degraded

    def on_output(self) -> None:
        """The worker printed something."""
        if self._process is None:
            return
        lines, more = self._process.read_output()
        for line in lines:
            log.info("worker %d: %s", self.spec.index, line)
        if not more:
            self._unwatch(self._process.output)

    def on_end(self) -> None:
        """The process has ended: buries it and its lanes, and says why."""
        process = self._process
        code = None if process is None else process.reap()
        if process is None or code is None:
            return
        self.on_control()
        self.on_output()
        for fd in (process.pidfd, process.control.fileno(), process.output):
            self._unwatch(fd)
        process.close()
        self._process = None
        self._tail = tuple(process.tail)
        why = self._killed_for or self._complaint or self._hung()
        cause = describe_end(code, oom=code == -signal.SIGKILL and not why and self._around.oom.took_one())
        self._ended(process.pid, f"{cause} ({why})" if why else cause, again=curable(code))

    def _hung(self) -> str:
        """What it did when a step killed it for taking too long; "" if none did."""
        return next(filter(None, (self._session.lane_hung(lane) for lane in self.spec.lanes)), "")

    def _ended(self, pid: int, cause: str, *, again: bool) -> None:
        drained = self.life.state is State.DRAINING
        now = time.monotonic()
        for lane in self.spec.lanes:
            self._session.lane_dead(lane)
        self._around.taken.difference_update(self.spec.lanes)
        self.last_end = cause
        self.life.ended(now, cause, curable=again)
        if drained:
            log.info("%s, pid %d, left: %s", self.name, pid, cause)
        elif self.life.state is State.FAILED:
            next_try = f"it is tried again in {self.life.retry_at - now:.0f} s" if again else "it is not started again"
            log.error("%s, pid %d, %s; %s", self.name, pid, self.life.error, next_try)
        else:
            log.warning("%s, pid %d, %s; started again in %.2f s", self.name, pid, cause, self.life.retry_at - now)

    def _unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._around.selector.unregister(fd)
