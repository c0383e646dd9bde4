"""`colibri serve` inside a machine, and streams that watch what it says."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import psutil

from colibri.v1 import operator_pb2 as op, operator_pb2_grpc
from service.client import Client, generate_request
from tests.numa.image import ROOT
from tests.numa.models import MODEL

PATIENCE = 240.0
"""Seconds that anything may take; a server starts in 15 here, thirty times what it takes elsewhere, and slower still on a busy host."""

PROMPTS = [[(7 * i + 5 * j) % 1000 + 3 for j in range(length)] for i, length in enumerate((1, 20, 36, 50, 2, 33, 64, 5))]
"""Token ids: nobody has to read a tokenizer to know what is to be computed."""

COLIBRI = (sys.executable, "-m", "ops.cli")
SOCKET, OPERATORS, LOG = "serve.sock", "operators.sock", "serve.log"


def until(condition: Callable[[], object], what: str, *, seconds: float = PATIENCE) -> float:
    """Polls until condition() holds. Returns how long that took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - start


class Server:
    """A running server, and an operator of it."""

    def __init__(self, popen: subprocess.Popen[bytes], folder: Path, operator: operator_pb2_grpc.OperatorStub) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.target = f"unix:{folder / SOCKET}"
        self.log = folder / LOG
        self.operator = operator
        self._folder = folder

    def pids(self) -> list[int]:
        """Its children."""
        return sorted(child.pid for child in psutil.Process(self.pid).children())

    def ready(self) -> list[int]:
        """Processes of workers that have joined the team."""
        workers = self.operator.ListWorkers(op.ListWorkersRequest(), timeout=PATIENCE).workers
        return sorted(worker.pid for worker in workers if worker.state == op.WORKER_STATE_READY)

    def topology(self) -> op.TopologyResponse:
        """What operators are told of the machine and of where the weights lie."""
        return self.operator.Topology(op.TopologyRequest(), timeout=PATIENCE)

    def command(self, *arguments: str) -> str:
        """Runs an operator's command, such as scale. Returns what it printed; it must succeed."""
        command = [*COLIBRI, *arguments, "--operator", f"unix:{self._folder / OPERATORS}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout


@contextlib.contextmanager
def served(folder: Path, options: str = "", *, enter: str = "exec") -> Iterator[Server]:
    """`colibri serve` with these options, up. Its sockets and its log are in folder. `enter` is what a shell runs before its command."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [*COLIBRI, "serve", str(MODEL), "--unix-socket", str(folder / SOCKET), "--operator-socket", str(folder / OPERATORS)]
    log = folder / LOG
    with log.open("wb") as out:
        line = f"{enter} {shlex.join(command)} --kv-memory 16M {options}"
        popen = subprocess.Popen(["/bin/sh", "-c", line], cwd=ROOT, stdout=out, stderr=out)
    try:
        until(lambda: popen.poll() is not None or b"serving" in log.read_bytes(), "the server is up")
        assert popen.poll() is None, log.read_text()
        with grpc.insecure_channel(f"unix:{folder / OPERATORS}") as channel:
            yield Server(popen, folder, operator_pb2_grpc.OperatorStub(channel))
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait(PATIENCE)


def answer(client: Client, which: int, *, tokens: int) -> tuple[int, ...]:
    """The greedy tokens that follow a prompt."""
    request = generate_request(tokens=PROMPTS[which], max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return client.complete(request, timeout=PATIENCE).token_ids


class Streams:
    """Callers in threads of their own that ask again and again, all prompts at once, and compare with what is expected."""

    def __init__(self, target: str, expected: Sequence[tuple[int, ...]]) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._expected = expected
        self._client = Client(target, timeout=PATIENCE)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(which,)) for which in range(len(expected))]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Returns when the answers under way are complete."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def more(self, count: int = 6) -> None:
        """Waits until so many more answers have come."""
        wanted = self.answers + count
        until(lambda: self.answers >= wanted or self.failures, f"{count} more answers")

    def _run(self, which: int) -> None:
        while not self._stopping.is_set() and not self.failures:
            try:
                got = answer(self._client, which, tokens=len(self._expected[which]))
            except Exception as error:
                self.failures.append(f"prompt {which}: {error}")
                return
            if got != self._expected[which]:
                self.failures.append(f"prompt {which}: {got} instead of {self._expected[which]}")
            self.answers += 1
