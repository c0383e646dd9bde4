"""Changes who computes while the service runs: each change is a transaction, and a lock puts the operators' wishes into an order."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from workers.lifecycle import State
from workers.plan import FrontLane, NodeWish, PlanError, TeamPlan, WorkerSpec, plan_team
from workers.supervisor import Supervisor, SupervisorError
from workers.topology import Topology

log = logging.getLogger("colibri.workers")

RESTORE_S = 10.0
"""What putting a former plan back may take: the new workers get no longer to leave."""


class ScaleError(RuntimeError):
    """The change could not be made; says why. The former workers compute as before."""


def stages(old: TeamPlan, new: TeamPlan) -> Iterator[TeamPlan]:
    """The plans to go through: first newcomers beside everybody else, so that somebody always computes, then without those who leave.

    A newcomer whose lanes are still another's comes with the last stage.
    """
    taken = {lane for spec in old.workers for lane in spec.lanes}
    indices = {spec.index for spec in old.workers}
    early = tuple(spec for spec in new.workers if spec.index not in indices and taken.isdisjoint(spec.lanes))
    if early:
        yield replace(new, workers=tuple(sorted((*old.workers, *early), key=lambda spec: spec.index)))
    yield new


class Scaling:
    """The wishes in force and what became of them. Its methods block, may be called from any thread, and follow one another."""

    def __init__(
        self, supervisor: Supervisor, topology: Topology, plan: TeamPlan, *, default: NodeWish, front_lane: FrontLane, smt: bool
    ) -> None:
        self.plan = plan
        self._supervisor = supervisor
        self._topology = topology
        self._default = default
        self._front_lane: FrontLane = front_lane
        self._smt = smt
        self._wishes: dict[int, NodeWish] = {}
        self._drained: frozenset[int] = frozenset()
        self._lock = threading.Lock()

    def scale(self, node: int | None, *, workers: int | None, threads: int | None, timeout: float) -> TeamPlan:
        """Gives a node (None: every one) so many workers of so many lanes; None leaves that as it is. Drained workers are wanted again."""
        with self._turn(timeout) as deadline:
            nodes = [node] if node is not None else [known.id for known in self._topology.nodes if known.cpus]
            wishes = dict(self._wishes)
            for place in nodes:
                before = wishes.get(place, self._default)
                wishes[place] = NodeWish(before.workers if workers is None else workers, before.threads if threads is None else threads)
            theirs = {spec.index for spec in self.plan.drained if spec.node in nodes}
            return self._change(wishes, self._drained - theirs, deadline)

    def drain_worker(self, index: int, timeout: float) -> TeamPlan:
        """Sends a worker away for good. KeyError if there is no such worker; one that is drained already stays so."""
        with self._turn(timeout) as deadline:
            self._spec(index)
            return self._change(self._wishes, self._drained | {index}, deadline)

    def drain_node(self, node: int, timeout: float) -> TeamPlan:
        """Sends all workers of a node away for good. KeyError if there is no such node."""
        with self._turn(timeout) as deadline:
            if node not in {known.id for known in self._topology.nodes}:
                raise KeyError(node)
            theirs = {spec.index for spec in self.plan.places if spec.node == node}
            return self._change(self._wishes, self._drained | theirs, deadline)

    def restart_worker(self, index: int, timeout: float) -> TeamPlan:
        """Makes a worker anew, a drained one too. If nobody else computed meanwhile, a spare does. KeyError if there is no such worker."""
        with self._turn(timeout) as deadline:
            spec = self._spec(index)
            if index in self._drained:
                return self._change(self._wishes, self._drained - {index}, deadline)
            plan = self.plan
            rest = tuple(other for other in plan.workers if other.index != index)
            around = []
            # One that does not compute itself, having failed perhaps, needs nobody in its place.
            if not plan.front_lane and self._computing((spec,)) and not self._computing(rest):
                rest = (*rest, self._spare(spec))
                around = [replace(plan, workers=(spec, *rest))]
            self._move([*around, replace(plan, workers=rest), *around, plan], deadline)
            return plan

    # ---------------------------------------------------------------- under the lock

    @contextlib.contextmanager
    def _turn(self, timeout: float) -> Iterator[float]:
        """One change at a time. Yields the deadline, of the monotonic clock."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise ScaleError(f"another change of the workers is still under way after {timeout:g} s: try again")
        try:
            yield deadline
        finally:
            self._lock.release()

    def _spec(self, index: int) -> WorkerSpec:
        for spec in self.plan.places:
            if spec.index == index:
                return spec
        raise KeyError(index)

    def _change(self, wishes: dict[int, NodeWish], drained: frozenset[int], deadline: float) -> TeamPlan:
        try:
            new = plan_team(
                self._topology,
                default=self._default,
                nodes=wishes,
                drained=drained,
                front_lane=self._front_lane,
                smt=self._smt,
                previous=self.plan,
            )
        except PlanError as error:
            raise ScaleError(str(error)) from error
        if new.workers != self.plan.workers:
            self._move(list(stages(self.plan, new)), deadline)
        self.plan, self._wishes = new, wishes
        self._drained = drained & {spec.index for spec in new.drained}
        return new

    def _move(self, plans: list[TeamPlan], deadline: float) -> None:
        """Goes through the plans; on failure puts the present one back and says why."""
        # Who is in trouble already and is not part of the change must not make it fail.
        snapshot = self._supervisor.snapshot()
        steady = set(self.plan.workers).intersection(*(plan.workers for plan in plans))
        well = {worker.index for worker in snapshot.workers if worker.state is State.READY}
        ignoring = {spec.index for spec in steady} - well
        try:
            for plan in plans:
                self._supervisor.set_plan(plan)
                self._supervisor.wait_ready(max(0.0, deadline - time.monotonic()), ignoring=ignoring)
        except SupervisorError as error:
            self._restore(ignoring)
            raise ScaleError(f"the workers stay as they were: {error}") from error

    def _restore(self, ignoring: set[int]) -> None:
        self._supervisor.set_plan(self.plan)
        try:
            self._supervisor.wait_ready(RESTORE_S, ignoring=ignoring)
        except SupervisorError as error:
            log.error("the former workers are not all back: %s", error)

    def _computing(self, specs: tuple[WorkerSpec, ...]) -> bool:
        ready = {worker.index for worker in self._supervisor.snapshot().workers if worker.state is State.READY}
        return any(spec.index in ready for spec in specs)

    def _spare(self, spec: WorkerSpec) -> WorkerSpec:
        """A worker like another, with an index and lanes nobody has. ScaleError if there is no room."""
        taken = {lane for other in self.plan.places for lane in other.lanes}
        lanes = [lane for lane in range(self.plan.max_lanes) if lane not in taken][: len(spec.lanes)]
        if not lanes:
            raise ScaleError(f"worker {spec.index} is all that computes, and no lane is free for a spare: add a worker first")
        index = max(other.index for other in self.plan.places) + 1
        return replace(spec, index=index, lanes=tuple(lanes), cpus=())
