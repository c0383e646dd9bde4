"""What a model did between two looks at it, for operators who watch. Taking a look costs a few file reads and holds up nobody."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from colibri.v1 import operator_pb2 as pb
from engine_c import OPERATIONS
from service.engine import EngineTotals
from service.hosted import Hosted
from service.load import Counters, between
from service.load_messages import load_message
from service.operator_messages import MODEL_STATES, worker_messages
from service.plan import SchedulerStats
from workers.lifecycle import State
from workers.slot import WorkerSnapshot
from workers.team import TeamDescription


@dataclass(frozen=True, slots=True)
class Look:
    """A model at a moment. CPU times are nanoseconds of its lanes' threads, by worker index; `front_ns` that of the front end's lane."""

    at: float  # time.monotonic()
    scheduler: SchedulerStats
    totals: EngineTotals
    tokens: int
    team: TeamDescription
    counters: Counters
    cpu_ns: dict[int, int] = field(default_factory=dict)
    front_ns: int = 0

    @property
    def workers(self) -> tuple[WorkerSnapshot, ...]:
        """All workers."""
        return self.team.workers.workers


def look_at(hosted: Hosted) -> Look:
    """Any thread, as long as the team stays open."""
    scheduler, totals = hosted.engine.stats()
    team = hosted.team.describe()
    return Look(
        at=time.monotonic(),
        scheduler=scheduler,
        totals=totals,
        tokens=hosted.desk.tokens,
        team=team,
        counters=hosted.team.session.telemetry(),
        cpu_ns={worker.index: _process_ns(worker.pid) for worker in team.workers.workers if worker.pid is not None},
        front_ns=_thread_ns(Path(f"/proc/self/task/{hosted.engine.thread_id}")) if hosted.team.session.options.front_lane else 0,
    )


def watched(hosted: Hosted, *, before: Look | None, experts: bool, windows: Sequence[float]) -> tuple[Look, pb.ModelStats]:
    """A look and what has happened since the one before; `experts`: with what each expert had; `windows`: moving ones besides, by their
    spans. Any thread, as long as the team stays open."""
    now = look_at(hosted)
    stats = model_stats(hosted, before, now)
    seconds = now.at - (before.at if before is not None else hosted.loaded_at)
    loads = [between(now.counters, before.counters if before is not None else None, seconds=seconds)]
    moving = dict(hosted.loads.windows())
    loads += [moving[span] for span in windows if span in moving]
    tell = partial(load_message, experts=experts, parts=hosted.loads.parts(), expert_bytes=hosted.loads.expert_bytes)
    stats.load.CopyFrom(tell(loads[0]))
    stats.windows.extend(map(tell, loads[1:]))
    return now, stats


def model_stats(hosted: Hosted, before: Look | None, now: Look) -> pb.ModelStats:
    """The difference; with nothing before, since the model was loaded."""
    old = before.totals if before is not None else EngineTotals()
    seconds = max(1e-9, now.at - (before.at if before is not None else hosted.loaded_at))
    pool, totals = now.scheduler.pool, now.totals
    workers = _worker_stats(hosted, before, now, seconds)
    return pb.ModelStats(
        model=hosted.name,
        state=MODEL_STATES[hosted.state],
        running=now.scheduler.running,
        waiting=now.scheduler.waiting,
        waiting_tokens=now.scheduler.waiting_tokens,
        kv_blocks_held=pool.held,
        kv_blocks_cached=pool.cached,
        kv_blocks=pool.total,
        steps=totals.steps - old.steps,
        rows=totals.rows - old.rows,
        tokens=now.tokens - (before.tokens if before is not None else 0),
        step_ms=(totals.step_ns - old.step_ns) / 1e6,
        wait_ms=(totals.wait_ns - old.wait_ns) / 1e6,
        serial_ms=(totals.serial_ns - old.serial_ns) / 1e6,
        operations=_operations(old.op_ns, totals.op_ns),
        lanes=_front_lane(hosted) + sum(len(worker.lanes) for worker in now.workers if worker.state is State.READY),
        tasks_homed=totals.tasks_homed - old.tasks_homed,
        tasks_local=totals.tasks_local - old.tasks_local,
        lanes_busy=_lanes_busy(hosted, before, now, workers, seconds),
        workers=workers,
        preemptions=now.scheduler.preemptions - (before.scheduler.preemptions if before is not None else 0),
        worker_restarts=now.team.workers.restarts - (before.team.workers.restarts if before is not None else 0),
    )


def _operations(before: Sequence[int], now: Sequence[int]) -> list[pb.OperationTime]:
    old = before or [0] * len(now)
    return [pb.OperationTime(operation=name, ms=(new - was) / 1e6) for name, was, new in zip(OPERATIONS, old, now, strict=False)]


def _worker_stats(hosted: Hosted, before: Look | None, now: Look, seconds: float) -> list[pb.WorkerStats]:
    old = {worker.index: worker for worker in before.workers} if before is not None else {}
    stats = []
    for worker, message in zip(now.workers, worker_messages(hosted.name, now.team), strict=True):
        was = old.get(worker.index)
        same = was is not None and was.pid == worker.pid
        tasks = worker.tasks - (was.tasks if was is not None and same else 0)
        spent = now.cpu_ns.get(worker.index, 0) - (before.cpu_ns.get(worker.index, 0) if before is not None and same else 0)
        busy = _share(spent, seconds, len(worker.lanes))
        stats.append(pb.WorkerStats(worker=message, tasks=max(0, tasks), busy=busy))
    return stats


def _lanes_busy(hosted: Hosted, before: Look | None, now: Look, workers: list[pb.WorkerStats], seconds: float) -> float:
    front = _front_lane(hosted)
    lanes = front + sum(len(stats.worker.lanes) for stats in workers)
    busy = sum(stats.busy * len(stats.worker.lanes) for stats in workers)
    busy += _share(now.front_ns - (before.front_ns if before is not None else 0), seconds, front)
    return min(1.0, busy / lanes) if lanes else 0.0


def _front_lane(hosted: Hosted) -> int:
    return int(bool(hosted.team.session.options.front_lane))


def _share(spent_ns: int, seconds: float, lanes: int) -> float:
    return min(1.0, max(0.0, spent_ns / 1e9 / seconds / lanes)) if lanes else 0.0


def _process_ns(pid: int) -> int:
    try:
        return sum(_thread_ns(task) for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it has just ended
        return 0


def _thread_ns(task: Path) -> int:
    """CPU time of a thread so far, to the nanosecond."""
    try:
        return int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
