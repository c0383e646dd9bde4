"""Keeps the workers of a team alive: one thread that watches processes and converges the world to the wanted plan."""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engine_c import Part, Session
from workers.cgroup import OomWatch
from workers.lifecycle import State
from workers.plan import TeamPlan, WorkerSpec
from workers.segments import ModelImage
from workers.slot import Slot, SupervisorConfig, Surroundings, WorkerSnapshot

__all__ = ["Supervisor", "SupervisorConfig", "SupervisorError", "SupervisorSnapshot", "WorkerSnapshot"]

log = logging.getLogger("colibri.workers")

PARTS_AT_ONCE = 64
"""That a worker is told of: a socket holds a few hundred."""


@dataclass(frozen=True, slots=True)
class SupervisorSnapshot:
    """All workers now, by index. restarts counts those of workers that have been taken away, too: it never falls."""

    workers: tuple[WorkerSnapshot, ...]
    wanted: int
    restarts: int

    @property
    def ready(self) -> int:
        """Workers that compute."""
        return sum(worker.state is State.READY for worker in self.workers)


class SupervisorError(RuntimeError):
    """The workers could not be started; names the worker, the cause and what it last printed."""


class Supervisor:
    """Its methods may be called from any thread. The session and the image must stay open until stop() has returned."""

    def __init__(self, session: Session, image: ModelImage, plan: TeamPlan, config: SupervisorConfig | None = None) -> None:
        self.session = session
        self._plan = plan
        self._selector = selectors.DefaultSelector()
        self._around = Surroundings(session, image, config or SupervisorConfig(), self._selector, OomWatch(), self._wake)
        self._slots: dict[int, Slot] = {}
        self._wanted: dict[int, WorkerSpec] = {}
        self._past_restarts = 0
        self._stopping = False
        self._changed = threading.Condition()
        self._wake_fd = -1
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- any thread

    def start(self, timeout: float = 30.0) -> None:
        """Starts all workers; returns when each has acknowledged. SupervisorError if one fails or time runs out; nothing is left then."""
        self.begin()
        try:
            self.wait_ready(timeout)
        except BaseException:
            self.stop()
            raise

    def begin(self) -> None:
        """Starts all workers and waits for nothing; wait_ready() tells what became of them, stop() ends them."""
        with self._changed:
            if self._thread is not None or self._stopping:
                raise SupervisorError("the supervisor was started or stopped before")
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_wake)
            self._wanted = {spec.index: spec for spec in self._plan.workers}
            # The thread that spawns lives as long as the workers: they get SIGKILL when it ends (PR_SET_PDEATHSIG).
            self._thread = threading.Thread(target=self._run, name="colibri-supervisor", daemon=True)
            self._thread.start()

    def wait_ready(self, timeout: float, *, ignoring: Collection[int] = ()) -> None:
        """Waits until the workers, but those with an ignored index, are what the plan wants.

        SupervisorError if one has failed or time runs out.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._pending(ignoring) or self._failed(ignoring) is not None, timeout)
            failed = self._failed(ignoring)
            if failed is not None:
                raise SupervisorError(failed.obituary())
            if pending := self._pending(ignoring):
                late = self._slots.get(pending[0])
                raise SupervisorError(f"not ready after {timeout:g} s: {f'worker {pending[0]}' if late is None else late.obituary()}")

    def remap(self, node: int, change: Callable[[], Sequence[Part]], timeout: float) -> bool:
        """Changes the image by `change`, which returns the parts that workers on a node are then to map, and tells those. Returns when all
        that live have, or after timeout seconds for every so many: who is late reads the same bytes from where they were. Whether all map
        all that they were ever told."""
        with self._changed:
            parts = change()
            slots = [slot for slot in self._slots.values() if slot.spec.node == node]
            for at in range(0, len(parts) or 1, PARTS_AT_ONCE):
                for slot in slots:
                    slot.tell(parts[at : at + PARTS_AT_ONCE])
                if not self._changed.wait_for(lambda: not any(slot.behind for slot in slots), timeout):
                    timeout = 0.0  # it is told of the rest all the same
            return not any(slot.behind or slot.missed for slot in slots)

    def set_plan(self, plan: TeamPlan) -> None:
        """Changes what is wanted: workers are started and drained accordingly. The same plan again changes nothing."""
        with self._changed:
            self._plan = plan
            if self._thread is not None and not self._stopping:
                self._wanted = {spec.index: spec for spec in plan.workers}
        self._wake()

    def restart(self, index: int) -> None:
        """Gives a failed worker another chance. KeyError if there is no such worker."""
        with self._changed:
            slot = self._slots[index]
            if slot.life.state is State.FAILED:
                slot.life.drop(time.monotonic())
        self._wake()

    def stop(self) -> None:
        """Drains all workers, ends those that do not leave in time, reaps them. Returns when none is left; harmless a second time."""
        with self._changed:
            thread, self._stopping, self._wanted = self._thread, True, {}
        if thread is not None:
            self._wake()
            thread.join()
        self._selector.close()

    def snapshot(self) -> SupervisorSnapshot:
        """What there is now."""
        with self._changed:
            now = time.monotonic()
            workers = tuple(self._slots[index].snapshot(now) for index in sorted(self._slots))
            return SupervisorSnapshot(workers, len(self._wanted), self._past_restarts + sum(worker.restarts for worker in workers))

    def _pending(self, ignoring: Collection[int]) -> list[int]:
        """Indices that are not yet what is wanted: a worker that is not ready, or one that has not left."""
        return [
            index
            for index in sorted((self._slots.keys() | self._wanted.keys()) - set(ignoring))
            if (slot := self._slots.get(index)) is None or slot.life.state is not State.READY or slot.spec != self._wanted.get(index)
        ]

    def _failed(self, ignoring: Collection[int]) -> Slot | None:
        """One that is wanted and has failed; what is no longer wanted may have failed, it is on its way out."""
        wanted = (slot for index, slot in self._slots.items() if index not in ignoring and self._wanted.get(index) == slot.spec)
        return next((slot for slot in wanted if slot.life.state is State.FAILED), None)

    def _wake(self) -> None:
        with self._changed:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # ---------------------------------------------------------------- the supervisor's thread

    def _run(self) -> None:
        timeout: float | None = 0.0
        done = False
        while not done:
            events = self._selector.select(timeout)
            with self._changed:
                try:
                    for key, _ in events:
                        handler: Callable[[], None] = key.data
                        handler()
                    timeout = self._converge(time.monotonic())
                except Exception:
                    # A bug here must not leave workers unwatched: say so and go on, slowly.
                    log.exception("the supervisor met an error")
                    timeout = 0.5
                done = self._stopping and not self._slots
                self._changed.notify_all()
        with self._changed:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _converge(self, now: float) -> float | None:
        """One pass towards what is wanted. Returns the seconds until the next is due, None if only an event can change anything."""
        for index, slot in list(self._slots.items()):
            # A worker that is wanted otherwise (other lanes, other CPUs) leaves first and is then made anew.
            if not slot.life.running and self._wanted.get(index) != slot.spec:
                self._past_restarts += slot.life.restarts
                del self._slots[index]
        for index, spec in self._wanted.items():
            if index not in self._slots:
                self._slots[index] = Slot(spec, self._around, now)
        due = [slot.converge(now, wanted=self._wanted.get(index) == slot.spec) for index, slot in self._slots.items()]
        times = [at for at in due if at is not None]
        return max(0.0, min(times) - now) if times else None
