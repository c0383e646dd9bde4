"""`colibri serve` inside a machine, and streams that watch what it says."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from service.client import Client, generate_request
from tests.fault.served import Served
from tests.numa.image import ROOT

PATIENCE = 120.0
"""Seconds that anything may take; a server starts in 15 here, ten times what it takes elsewhere."""

PROMPTS = ["a", "The nodes of a machine", "xyz " * 9, "0123456789" * 5, "Hm", "Weights lie near those who read them.", "q" * 70, "?!"]


def until(condition: object, what: str, *, seconds: float = PATIENCE) -> float:
    """Polls until condition() holds. Returns how long that took."""
    assert callable(condition)
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - start


@contextlib.contextmanager
def served(model: Path, folder: Path, options: str = "", *, enter: str = ":") -> Iterator[Served]:
    """`colibri serve` with these options on a socket in folder, up. `enter` is a shell command run in its process first."""
    folder.mkdir(parents=True, exist_ok=True)
    socket, log = folder / "serve.sock", folder / "serve.log"
    command = [sys.executable, "-m", "ops.cli", "serve", str(model), "--unix-socket", str(socket), "--kv-memory", "16M"]
    with log.open("wb") as out:
        line = f"{enter}; exec {shlex.join(command)} {options}"
        popen = subprocess.Popen(["/bin/sh", "-c", line], cwd=ROOT, stdout=out, stderr=out)
    try:
        until(lambda: popen.poll() is not None or b"serving" in log.read_bytes(), "the server is up")
        assert popen.poll() is None, log.read_text()
        yield Served(popen, f"unix:{socket}", log, wanted=0)
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait(PATIENCE)


def answer(client: Client, which: int, *, tokens: int) -> tuple[int, ...]:
    """The greedy tokens that follow a prompt."""
    request = generate_request(PROMPTS[which % len(PROMPTS)], max_tokens=tokens, temperature=0.0, ignore_eos=True)
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

    def more(self, count: int = 8) -> None:
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
