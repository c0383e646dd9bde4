"""One node agent: a `colibri node` process that is started again when it ends. Knows nothing of Ray."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

log = logging.getLogger("colibri.ray")
FIRST_PAUSE = 0.5
"""Seconds before a process that has ended is started again; twice as long after each that did not last,"""
LONGEST_PAUSE = 10.0
"""up to this."""
_LASTS = 30.0  # seconds after which a process counts as one that runs
_DRAIN = 60.0  # seconds to finish what it has, once told to end


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What an agent runs. `command` is a whole command line that listens on `port`."""

    name: str
    port: int
    command: tuple[str, ...]


def node_command(
    program: Sequence[str], model: str, *, share: tuple[int, int], name: str, host: str, port: int, extra: Sequence[str] = ()
) -> tuple[str, ...]:
    """The command line of one of a number of nodes that have all experts between them."""
    number, count = share
    options = ("--share", f"{number}/{count}", "--name", name, "--host", host, "--port", str(port))
    return (*program, "node", model, *options, *extra)


class Agent:
    """Runs from its making to `stop`. Dies with its process: the kernel ends what it has started (setpriv, of util-linux)."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._error = ""
        self._stopping = threading.Event()
        # The kernel goes by the thread that started a process: this one lives as long as the agent.
        self._thread = threading.Thread(target=self._keep_running, name="agent", daemon=True)
        self._thread.start()

    def state(self) -> tuple[int, int, str]:
        """(process id or 0, times it was started again, how it ended last or why it can't be started)."""
        with self._lock:
            running = self._process is not None and self._process.poll() is None
            pid = self._process.pid if running and self._process is not None else 0
            return pid, max(0, self._starts - 1), self._error

    def stop(self) -> None:
        """Lets the process finish what it has, and end."""
        self._stopping.set()
        with self._lock:
            if self._process is not None:
                self._process.terminate()
        self._thread.join(_DRAIN)
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _keep_running(self) -> None:
        pause = FIRST_PAUSE
        while (process := self._start()) is not None or not self._stopping.is_set():
            lasted = process is not None and self._wait(process)
            pause = FIRST_PAUSE if lasted else pause
            if self._stopping.wait(pause):
                return
            pause = min(2 * pause, LONGEST_PAUSE)

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            self._starts += 1
            try:
                self._process = subprocess.Popen(("setpriv", "--pdeathsig", "KILL", *self.spec.command), stdin=subprocess.DEVNULL)
            except OSError as error:
                self._error = f"{self.spec.command[0]} can't be started: {error.strerror}"
                log.warning("%s: %s", self.spec.name, self._error)
                self._process = None
            return self._process

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Until it ends; whether it ran for long."""
        try:
            process.wait(_LASTS)
            lasted = False
        except subprocess.TimeoutExpired:
            process.wait()
            lasted = True
        with self._lock:
            self._error = _ended(process.returncode)
        if not self._stopping.is_set():
            log.warning("%s: %s; it is started again", self.spec.name, self._error)
        return lasted


def _ended(code: int) -> str:
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with code {code}"
