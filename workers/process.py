"""One worker process as the supervisor holds it: spawned, spoken to, reaped. No policy here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _cffi_backend

from engine_c import EngineError, Part
from engine_c.spawn import spawn
from workers import worker_main
from workers.parts import PART_RECORD
from workers.plan import WorkerSpec
from workers.segments import ModelImage

TAIL_LINES = 20
"""Lines of a worker's output that are kept for error messages."""

MAIN = Path(worker_main.__file__).resolve()
IMPORT_PATHS = (str(MAIN.parent.parent), str(Path(_cffi_backend.__file__).resolve().parent))
"""Where engine_c and cffi's backend are: all that a worker started with -S has to be told."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a worker said on its control socket: that it is ready and what the machine refused it, or why it can't work; or, mapped > 0,
    that it has followed so many records of parts, and why the last could not be."""

    ready: bool = False
    error: str = ""
    degraded: tuple[str, ...] = ()
    mapped: int = 0
    unmapped: str = ""


class WorkerProcess:
    """A running worker. pidfd, control and output are to be watched for reading; reap() after pidfd is readable, then close()."""

    def __init__(self, spec: WorkerSpec, *, image: ModelImage, team_fd: int, arena_fd: int) -> None:
        """Starts it; it then waits for go(). OSError if it could not be started."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.stop_told = False
        self._partial = b""
        self._messages = b""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self.control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.callback(self.control.close)
            theirs.callback(other_end.close)
            self.output, printed = os.pipe()
            ours.callback(os.close, self.output)
            theirs.callback(os.close, printed)
            nothing = os.open(os.devnull, os.O_RDONLY)
            theirs.callback(os.close, nothing)
            table = image.table_fd(spec.node)
            words = command(spec, control=other_end.fileno(), model_table=table, team_fd=team_fd, arena_fd=arena_fd)
            keep = {other_end.fileno(), table, team_fd, arena_fd, *(part.fd for part in image.parts_for(spec.node))}
            try:
                # It leads a group of its own, so that Ctrl-C in a terminal is for the front end alone, which drains; in the same
                # session, so that the kernel wakes a stopped process whose group loses its last parent and tells it to end (SIGHUP,
                # SIGCONT), which no other way of dying with the front end does for one stopped before its first instruction.
                self.pid, self.pidfd = spawn(words, stdin=nothing, output=printed, keep=keep)
            except EngineError as refusal:
                raise OSError(str(refusal)) from refusal
            ours.pop_all()
        self.control.setblocking(False)
        os.set_blocking(self.output, False)

    def go(self) -> None:
        """Its lanes are bound: it may attach. A refusal means that it is dead, which its pidfd tells."""
        with contextlib.suppress(OSError):
            self.control.send(b"g")

    def send_part(self, part: Part) -> bool:
        """Tells it to map a part from there. Returns whether that could be said; a process that is dead or takes nothing in is dealt with
        elsewhere."""
        try:
            socket.send_fds(self.control, [PART_RECORD.pack(part.node, part.offset, part.bytes)], [part.fd])
        except OSError:
            return False
        return True

    def stopped(self) -> bool:
        """Whether a signal has stopped it (SIGSTOP): it then neither computes nor dies of its own accord."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def watch_stops(self, tell: Callable[[], None]) -> None:
        """Sets stop_told and calls tell, on a thread of its own, as soon as a signal stops it: an event that no descriptor has."""
        self.stop_told = False

        def watch() -> None:
            with contextlib.suppress(ChildProcessError):  # it has ended and been reaped
                what = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                if what is not None and what.si_code == os.CLD_STOPPED:
                    self.stop_told = True
                    tell()

        threading.Thread(target=watch, name=f"colibri-stop-{self.pid}", daemon=True).start()

    def read_control(self) -> tuple[list[Message], bool]:
        """Messages that came, and whether more can come."""
        try:
            data = self.control.recv(65536)
        except BlockingIOError:
            return [], True
        except OSError:
            return [], False
        *lines, self._messages = (self._messages + data).split(b"\n")
        return [_message(line) for line in lines], bool(data)

    def read_output(self) -> tuple[list[str], bool]:
        """Lines it printed, and whether more can come."""
        try:
            data = os.read(self.output, 65536)
        except BlockingIOError:
            return [], True
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data and self._partial:
            lines.append(self._partial)
            self._partial = b""
        texts = [line.decode("utf-8", "replace") for line in lines]
        self.tail.extend(texts)
        return texts, bool(data)

    def send_signal(self, number: signal.Signals) -> None:
        """Through the pidfd: never to another process with the same number."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int | None:
        """The exit code (negative: the signal) once it has ended, None before; leaves no zombie."""
        ready = select.poll()
        ready.register(self.pidfd, select.POLLIN)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) if ready.poll(0) else None

    def close(self) -> None:
        """Gives the descriptors back."""
        self.control.close()
        os.close(self.output)
        os.close(self.pidfd)


def command(spec: WorkerSpec, *, control: int, model_table: int, team_fd: int, arena_fd: int) -> list[str]:
    """The command line of a worker: isolated from PYTHON* variables and site-packages."""
    options = {
        "name": f"colibri-w{spec.index}",
        "parent": os.getpid(),
        "path": os.pathsep.join(IMPORT_PATHS),
        "control": control,
        "model-table": model_table,
        "team": team_fd,
        "arena": arena_fd,
        "lanes": ",".join(map(str, spec.lanes)),
        "cpus": ",".join(map(str, spec.cpus)),
        "node-cpus": ",".join(map(str, spec.node_cpus)),
        "memory-node": "" if spec.memory_node is None else spec.memory_node,
    }
    return [sys.executable, "-I", "-S", str(MAIN), *(str(part) for name, value in options.items() for part in ("--" + name, value))]


def describe_end(code: int, *, oom: bool = False) -> str:
    """An exit code in words: signal names, our own exit codes, the OOM killer if one of its kills was counted."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}" + (" (out of memory: the kernel's choice)" if oom and code == -signal.SIGKILL else "")
    known = {
        worker_main.EXIT_MISMATCH: ": its segments do not fit",
        worker_main.EXIT_LANE: ": a lane failed",
        worker_main.EXIT_ORPHAN: ": it lost its front end",
    }
    return f"exited with code {code}" + known.get(code, "")


def curable(code: int) -> bool:
    """Whether starting the same worker again may help."""
    return code != worker_main.EXIT_MISMATCH


def _message(line: bytes) -> Message:
    try:
        fields = json.loads(line)
        return Message(
            ready=bool(fields.get("ready")),
            error=str(fields.get("error", "")),
            degraded=tuple(map(str, fields.get("degraded", ()))),
            mapped=int(fields.get("mapped", 0)),
            unmapped=str(fields.get("unmapped", "")),
        )
    except (ValueError, TypeError, AttributeError):
        return Message(error=f"unreadable message {line[:80]!r}")
