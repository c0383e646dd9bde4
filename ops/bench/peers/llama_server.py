"""A peer's llama-server with several streams of different random tokens."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ops.bench.measure import BenchError
from ops.bench.peers.output import Answered, check_answers, read_completions
from ops.bench.peers.programs import Peer
from ops.bench.served import free_port, stop

_START_SECONDS, _ANSWER_SECONDS = 120.0, 300.0
_POLL = 0.02
_BATCH = 2048  # the servers' default: prompt tokens they take at once
_SLACK = 16  # tokens of context a stream has over what is needed
_DYING_SECONDS = 1.0  # from its connections' end to the process's
_LOG_END = 1500  # bytes of the log shown with an error


@dataclass(frozen=True, slots=True)
class Server:
    """A llama-server that is healthy."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: IO[bytes]

    def failure(self, what: str) -> BenchError:
        """What happened, whether it still runs, and the end of what it printed."""
        try:
            state = f"it ended with exit code {self.process.wait(_DYING_SECONDS)}"
        except subprocess.TimeoutExpired:
            state = "it still runs"
        self.log.seek(0, 2)
        self.log.seek(max(0, self.log.tell() - _LOG_END))
        return BenchError(f"{self.name}'s llama-server {what}; {state}. The end of its log: {self.log.read().decode(errors='replace')}")


@contextmanager
def running(peer: Peer, model: Path, *, streams: int, tokens: int, threads: int) -> Iterator[Server]:
    """A server with so many slots of `tokens` tokens. BenchError with its log if it does not come up."""
    port = free_port()
    command = [str(peer.program("llama-server")), *server_options(peer, model, streams=streams, tokens=tokens, threads=threads)]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:  # ik_llama.cpp's writes a log where it runs
        process = subprocess.Popen(
            [*command, "--port", str(port)], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        server = Server(peer.name, process, port, log)
        try:
            _wait_healthy(server)
            yield server
        finally:
            stop(process)


def server_options(peer: Peer, model: Path, *, streams: int, tokens: int, threads: int) -> list[str]:
    """Prompts of all streams fit one batch, so that they begin to answer together; nothing of earlier prompts is kept."""
    context = -(-(tokens + _SLACK) // 256) * 256
    options = ["-m", str(model.resolve()), "--host", "127.0.0.1", "-np", str(streams), "-c", str(streams * context)]
    options += ["-t", str(threads), "-tb", str(threads), "-b", str(max(_BATCH, streams * tokens)), "--cache-ram", "0"]
    return [*options, *peer.server_extra]


def _wait_healthy(server: Server) -> None:
    end = time.monotonic() + _START_SECONDS
    while server.process.poll() is None:
        try:
            if _call(server.port, "GET", "/health", None, timeout=_START_SECONDS)[0] == 200 and server.process.poll() is None:
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet
        if time.monotonic() > end:
            raise server.failure(f"was not ready after {_START_SECONDS:.0f} s")
        time.sleep(_POLL)
    raise server.failure("did not start")


def ask_streams(server: Server, *, streams: int, prompt: int, answer: int, vocab: range, seed: int) -> list[Answered]:
    """One request with a prompt of random tokens of its own for each stream, so that all are let in at once; greedy, past the end of
    sequence, nothing cached or streamed. BenchError if the server fails or did something else than that."""
    numbers = random.Random(seed)
    body = completion_request([[numbers.choice(vocab) for _ in range(prompt)] for _ in range(streams)], answer)
    begin = time.monotonic()
    try:
        status, found = _call(server.port, "POST", "/completion", body, timeout=_ANSWER_SECONDS)
    except (OSError, http.client.HTTPException) as cause:
        raise server.failure(f"gave no answer ({cause!r})") from cause
    if status != 200:
        raise BenchError(f"{server.name}'s llama-server answered with HTTP status {status}: {found[:500]!r}")
    answers = read_completions(found)
    check_answers(answers, streams=streams, prompt=prompt, answer=answer, seconds=time.monotonic() - begin)
    return answers


def completion_request(prompts: list[list[int]], answer: int) -> bytes:
    """The body of POST /completion."""
    greedy = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0}  # no sort of the whole vocabulary
    wish = {"prompt": prompts, "n_predict": answer, "ignore_eos": True, "cache_prompt": False, "stream": False} | greedy
    return json.dumps(wish).encode()


def _call(port: int, method: str, path: str, body: bytes | None, *, timeout: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
