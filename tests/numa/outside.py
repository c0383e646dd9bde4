"""The host's side: boots a machine for all tests that want one, and hands on the reports of the pytest inside as they come."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.numa.guest import REPORTS
from tests.numa.image import CACHE, ROOT, MachineError
from tests.numa.machine import MACHINES, Running

TEST_SECONDS = 600
"""A test may take this long inside, where programs run some thirty times slower, and slower still on a busy host."""

SCRIPT = """\
cd {root} && export TMPDIR=/run HOME=/run XDG_RUNTIME_DIR=/run PYTHONDONTWRITEBYTECODE=1 COLIBRI_START_TIMEOUT=300
exec {python} -m pytest -p tests.numa.guest -p no:cacheprovider --timeout={seconds} -m numa --basetemp=/run/pytest @/job/tests
"""


class Outside:
    """The tests of one machine."""

    def __init__(self, name: str, tests: Sequence[str], *, timeout: float, meanwhile: Callable[[], None]) -> None:
        """meanwhile: called while reports are awaited."""
        self.name = name
        self._meanwhile = meanwhile
        self._tests = tests
        self._timeout = timeout
        self._running: Running | None = None
        self._lines: Iterator[dict[str, object]] = iter(())
        self._refusal: MachineError | None = None

    @property
    def waiting(self) -> bool:
        """Whether the machine has not been started."""
        return self._running is None and self._refusal is None

    @property
    def busy(self) -> bool:
        """Whether it is switched on."""
        return self._running is not None and self._running.on

    def start(self) -> None:
        """Boots the machine, if it has not been. What goes wrong is told with the first report."""
        if self.waiting:
            try:
                self._running = self._boot()
            except MachineError as refusal:
                self._refusal = refusal
            else:
                self._lines = self._follow(self._running)

    def reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """The reports of a test, up to that of its teardown; if the machine fails, one that says how."""
        start = time.time()
        self.start()
        try:
            if self._running is None:
                raise self._refusal or MachineError("it was not started")
            for data in self._lines:
                report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
                if report.nodeid == item.nodeid:
                    yield report
                    if report.when == "teardown":
                        return
            raise MachineError(f"the machine {self.name} ended before this test\n{self._running.story()}")
        except MachineError as error:
            text, now = str(error), time.time()
            yield pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call", start=start, stop=now, duration=now - start)

    def close(self) -> None:
        """Switches the machine off and removes its folder: errors have told what was in it."""
        if self._running is not None:
            self._running.close()
            shutil.rmtree(self._running.job)

    def _boot(self) -> Running:
        (CACHE / "jobs").mkdir(parents=True, exist_ok=True)
        job = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=CACHE / "jobs"))
        (job / "tests").write_text("\n".join(self._tests) + "\n")
        script = SCRIPT.format(root=shlex.quote(str(ROOT)), python=shlex.quote(sys.executable), seconds=TEST_SECONDS)
        (job / "run.sh").write_text(script)
        return Running(MACHINES[self.name], job, timeout=self._timeout)

    def _follow(self, running: Running) -> Iterator[dict[str, object]]:
        """Whole lines of the report file, until the machine is off."""
        path, at = running.job / REPORTS, 0
        ended = False
        while not ended:
            ended = not running.running()
            if path.exists():
                with path.open("rb") as lines:
                    lines.seek(at)
                    for line in lines:
                        if not line.endswith(b"\n"):
                            break
                        at += len(line)
                        yield json.loads(line)
            self._meanwhile()
            time.sleep(0.05)
