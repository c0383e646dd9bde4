"""Soaks a real server in faults: `python -m tests.fault.soak --seconds 1800` (also `make soak SECONDS=1800`).

Eight streams ask for known answers all the time, while workers are killed, stopped, starved, added and drained in a random order that the
printed seed repeats. At the end: no failed call, no wrong token, no zombie, no descriptor or memfd more than before, memory flat, and how
long each kind of fault took and stalled a stream. Exit code 1 if any of that does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ops.random_model import ModelShape, make_model
from tests.fault.faults import Event, Kind, kinds, out_of_memory, strike
from tests.fault.harness import wait_for
from tests.fault.load import Answer, Load, answers
from tests.fault.memory_group import NoGroup, memory_group
from tests.fault.served import Holdings, Served, colibri_serve

SHAPE = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, ffn=448, experts=8, top_k=2, vocab=1024, max_context=1024)
STREAMS = 8
WORKERS = 3
TIMEOUT_S = 120.0
QUIET_S = 3.0
"""Watched before the first fault: what a step is, and what this machine does to a stream by itself."""
GROWTH = 24 << 20
"""Bytes the front end may grow by from the first quarter of the faults to the end: allocators settle, leaks of a fault each do not hide."""
SPARE_THREADS = 4
"""gRPC's own pool comes and goes."""
DEADLINE_S = 1.0
"""The server's default hang_ms."""


@dataclass(frozen=True, slots=True)
class Row:
    """All faults of a kind, in seconds. slow: events whose recovery, stalled: whose stall took longer than the kind allows."""

    kind: str
    events: int
    recovery_median: float
    recovery_longest: float
    slow: int
    stall_median: float
    stall_longest: float
    stalled: int


@dataclass
class Report:
    """What came of it."""

    seed: int
    seconds: float
    calls: int = 0
    tokens: int = 0
    step_s: float = 0.0  # longest pause of a stream before the first fault
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    rss_growth: int = 0
    exit_code: int = -1

    @property
    def sound(self) -> bool:
        """Nothing was lost and nothing is left."""
        return not (self.failed or self.wrong or self.leaks or self.exit_code)


def soak(seconds: float, *, seed: int, folder: Path) -> Report:
    """Runs it all in about seconds plus fifteen."""
    report = Report(seed, seconds)
    model = folder / "model.colibri"
    make_model(model, SHAPE, quant="int8")
    with colibri_serve(model, folder, workers=0) as alone:
        expected = answers(alone.target, timeout=TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        faults, enter = kinds(DEADLINE_S), ":"
        try:
            group = stack.enter_context(memory_group("colibri-soak"))
        except NoGroup as refusal:
            report.left_out.append(f"memory-limit kills: {refusal}")
        else:
            faults.append(out_of_memory(group))
            enter = group.enter
        served = stack.enter_context(colibri_serve(model, folder, workers=WORKERS, enter=enter, options="--load memfd --kv-memory 64MiB"))
        _soak(served, expected, faults, report)
    return report


def _soak(served: Served, expected: Sequence[Answer], faults: Sequence[Kind], report: Report) -> None:
    served.ready()
    _load(served, expected, report, lambda load: None)  # connections and pools are made once
    before = _settled(served)

    def disturb(load: Load) -> None:
        begin = time.monotonic()
        pause(QUIET_S)
        report.step_s = load.longest_pause(begin, time.monotonic())
        report.rss_growth = _strike_all(served, load, faults, report)
        served.scale(WORKERS)
        report.rows = [_row(kind, report.events, report.step_s) for kind in faults]

    _load(served, expected, report, disturb)
    report.leaks += _leaks(served, before, report.rss_growth)
    workers = served.pids()
    report.exit_code = served.terminate()
    report.leaks += [f"process {pid} outlived the server" for pid in workers if os.path.exists(f"/proc/{pid}")]


def _load(served: Served, expected: Sequence[Answer], report: Report, meanwhile: Callable[[Load], None]) -> None:
    """Runs the load, does something meanwhile, adds to the report what the streams saw."""
    load = Load(served.target, expected, streams=STREAMS, timeout=TIMEOUT_S)
    load.start()
    try:
        wait_for(lambda: load.tokens > 1000, seconds=30, what="the load runs")
        meanwhile(load)
    finally:
        load.stop()
    for stream in load.streams:
        report.calls += stream.calls
        report.tokens += stream.tokens
        report.failed += stream.failed
        report.wrong += stream.wrong


def _strike_all(served: Served, load: Load, faults: Sequence[Kind], report: Report) -> int:
    """Fault after fault, each kind once before any comes again. Returns by how much the front end grew in the last three quarters."""
    rng = random.Random(report.seed)
    todo: list[Kind] = []
    begin, early, told = time.monotonic(), 0, 0.0
    while (passed := time.monotonic() - begin) < report.seconds:
        todo = todo or rng.sample(faults, len(faults))
        event = strike(todo.pop(), served, rng)
        pause(rng.uniform(0.0, 1.0))  # what a stream waits for comes meanwhile
        report.events.append(replace(event, stall_s=load.longest_pause(event.begin, event.end)))
        if not early and passed > report.seconds / 4:
            early = served.holdings().rss
        if passed > told:
            told += 60.0
            print(f"{passed:5.0f} s: {len(report.events)} faults, {load.tokens} tokens, {load.troubles()} failed or wrong", flush=True)
    return served.holdings().rss - early


def _row(kind: Kind, events: Sequence[Event], step_s: float) -> Row:
    of_kind = [event for event in events if event.kind == kind.name]
    recoveries = [event.recovery_s for event in of_kind] or [0.0]
    stalls = [event.stall_s for event in of_kind] or [0.0]
    over = sum(stall > kind.stall_s + step_s for stall in stalls)
    slow = sum(recovery > kind.recovery_s for recovery in recoveries)
    return Row(kind.name, len(of_kind), statistics.median(recoveries), max(recoveries), slow, statistics.median(stalls), max(stalls), over)


def _settled(served: Served) -> Holdings:
    """What the front end holds once the connections of the clients that left are closed."""
    last = [served.holdings()]

    def same() -> bool:
        pause(0.3)
        last.append(served.holdings())
        return last[-1].descriptors == last[-2].descriptors

    wait_for(same, seconds=10, what="the number of descriptors settles")
    return last[-1]


def _leaks(served: Served, before: Holdings, growth: int) -> list[str]:
    after = _settled(served)
    found = [f"zombie {pid}" for pid in served.zombies()]
    if len(served.pids()) != served.wanted:
        found.append(f"{len(served.pids())} worker processes, not {served.wanted}")
    found += [f"{count} descriptors of {what}" for what, count in (after.descriptors - before.descriptors).items()]
    if after.threads > before.threads + SPARE_THREADS:
        found.append(f"{after.threads} threads, {before.threads} before")
    if growth > GROWTH:
        found.append(f"the front end grew by {growth >> 20} MiB")
    return found


def pause(seconds: float) -> None:
    """Lets time pass: what a soak is for."""
    threading.Event().wait(seconds)


# ---------------------------------------------------------------- a program


def table(report: Report) -> str:
    """For people: milliseconds."""
    lines = [f"{'fault':16} {'times':>5} {'recovery median':>16} {'longest':>8} {'stall median':>13} {'longest':>8} {'over':>5}"]
    for row in report.rows:
        times = (row.recovery_median, row.recovery_longest, row.stall_median, row.stall_longest)
        a, b, c, d = (f"{1e3 * value:.0f}" for value in times)
        lines.append(f"{row.kind:16} {row.events:5} {a:>16} {b:>8} {c:>13} {d:>8} {row.slow + row.stalled:5}")
    lines.append(f"longest pause without a fault: {1e3 * report.step_s:.0f} ms; all times in ms")
    lines.append(f"{report.calls} calls, {report.tokens} tokens; failed {len(report.failed)}, wrong {len(report.wrong)}")
    lines.append(f"front end grew by {report.rss_growth / 2**20:.1f} MiB; exit code {report.exit_code}")
    lines += [f"NOT DONE: {text}" for text in report.left_out]
    lines += [f"FAILED CALL: {text}" for text in report.failed[:20]]
    lines += [f"WRONG: {text}" for text in report.wrong[:20]]
    lines += [f"LEFT BEHIND: {text}" for text in report.leaks]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats a run's order of faults; drawn and printed by default")
    parser.add_argument("--json", type=Path, default=None, help="write the report there as well")
    parser.add_argument("--log", type=Path, default=None, help="keep the server's log there")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"soak of {arguments.seconds:g} s, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="colibri-soak-") as folder:
        try:
            report = soak(arguments.seconds, seed=seed, folder=Path(folder))
        finally:
            if arguments.log is not None:
                shutil.copy(Path(folder) / "serve.log", arguments.log)
    print(table(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    sys.exit(0 if report.sound else 1)


if __name__ == "__main__":
    main()
