"""Lanes, the threads that compute: a session's view of them, and a worker, who runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_c._engine import ffi, lib
from engine_c.basics import EngineError
from engine_c.library import OPERATIONS, fail
from engine_c.model import Model, User

if TYPE_CHECKING:
    from engine_c._engine import Pointer
    from engine_c.structs import SessionOptions


class Lanes(User):
    """The part of a session that any thread may call while it is open."""

    def __init__(self, pointer: Pointer, destructor: object, model: Model, options: SessionOptions) -> None:
        super().__init__(pointer, destructor, model)
        self.options = options

    def lane_bind(self, lane: int, *, pid: int, pidfd: int) -> None:
        """Binds an EMPTY or DEAD lane to the process that will run it, before it attaches; pidfd -1: a thread of this process."""
        err = ffi.new("colibri_error *")
        if lib.colibri_lane_bind(self._pointer, lane, pid, pidfd, err):
            raise fail(err)

    def lane_leave(self, lane: int) -> None:
        """Asks a lane to leave at the next step boundary."""
        self._lane_call(lane, lib.colibri_lane_leave(self._pointer, lane))

    def lane_dead(self, lane: int) -> None:
        """Says that a lane's process has been seen to end; the lane becomes EMPTY."""
        self._lane_call(lane, lib.colibri_lane_dead(self._pointer, lane))

    def lane_state(self, lane: int) -> int:
        """LANE_EMPTY, LANE_READY, LANE_ACTIVE, LANE_LEAVING or LANE_DEAD."""
        return self._lane_call(lane, lib.colibri_lane_get_state(self._pointer, lane))

    def lane_hung(self, lane: int) -> str:
        """What the lane's process was doing when a step killed it for taking longer than hang_ms, in words; "" if none did."""
        what = ffi.new("int32_t[]", 2)
        ms = lib.colibri_lane_hung(self._pointer, lane, what, what + 1)
        return f"hung for {ms} ms in layer {what[1]}, {OPERATIONS[what[0]]}" if ms else ""

    def lane_tasks(self, lane: int) -> int:
        """Tasks a lane has completed since it attached."""
        return lib.colibri_lane_tasks(self._pointer, lane)

    def lane_place(self, lane: int, node: int) -> None:
        """Says on which NUMA node a lane runs, -1 unknown; holds from the next step on. Lane max_lanes is the front end's own."""
        self._lane_call(lane, lib.colibri_lane_place(self._pointer, lane, node))

    def lane_homed(self, lane: int) -> int:
        """Tasks with a home node that whoever had the lane has completed."""
        return lib.colibri_lane_homed(self._pointer, lane)

    def lane_local(self, lane: int) -> int:
        """Those of lane_homed whose home is the lane's node."""
        return lib.colibri_lane_local(self._pointer, lane)

    def _lane_call(self, lane: int, status: int) -> int:
        if status < 0:
            raise EngineError(status, f"lane {lane} of {self.options.max_lanes}: refused in its present state or out of range")
        return status


class Worker(User):
    """A lane's side of a team, usually in another process than the session."""

    _kind = "worker"

    def __init__(self, model: Model, team_fd: int, arena_fd: int) -> None:
        out, err = ffi.new("colibri_worker **"), ffi.new("colibri_error *")
        if lib.colibri_worker_attach(model._pointer, team_fd, arena_fd, out, err):
            raise fail(err)
        super().__init__(out[0], lib.colibri_worker_detach, model)

    def run(self, lane: int, *, cpu: int = -1) -> None:
        """Computes on the calling thread, the GIL released, until the lane is asked to leave. cpu >= 0 pins the thread first."""
        err = ffi.new("colibri_error *")
        if lib.colibri_worker_run(self._pointer, lane, cpu, err):
            raise fail(err)

    def detach(self) -> None:
        """Unmaps the segments, once no thread runs a lane."""
        self.close()
