"""A peer's llama-server with several streams of different random tokens."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ops.bench.measure import BenchError
from ops.bench.peers.output import Answered, read_completion
from ops.bench.peers.programs import Peer
from ops.bench.served import free_port, stop

_START_SECONDS, _ANSWER_SECONDS = 600.0, 1800.0
_POLL = 0.02
_BATCH = 2048  # the server's default: prompt tokens it takes at once
_SLACK = 16  # tokens of context a stream has over what is needed


@contextmanager
def running(peer: Peer, model: Path, *, streams: int, tokens: int, threads: int) -> Iterator[int]:
    """A server with so many slots of `tokens` tokens that is healthy; its port."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(peer.program("llama-server")), *_options(peer, model, streams, tokens, threads), "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            if not _wait_healthy(process, port):
                log.seek(0)
                raise BenchError(f"{peer.name}'s llama-server did not start: {log.read()[-1500:].decode(errors='replace')}")
            yield port
        finally:
            stop(process)


def _options(peer: Peer, model: Path, streams: int, tokens: int, threads: int) -> list[str]:
    """Prompts of all streams fit one batch, so that they begin to answer together; nothing of earlier prompts is kept."""
    context = -(-(tokens + _SLACK) // 256) * 256
    options = ["-m", str(model), "--host", "127.0.0.1", "-np", str(streams), "-c", str(streams * context)]
    options += ["-t", str(threads), "-tb", str(threads), "-b", str(max(_BATCH, streams * tokens)), "--cache-ram", "0"]
    return [*options, "-fa", "on", "-rtr"] if peer.repacks else options


def _wait_healthy(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if _call(port, "GET", "/health", None)[0] == 200:
                return True
        except OSError:
            pass  # not listening yet
        time.sleep(_POLL)
    return False


def ask_streams(port: int, *, streams: int, prompt: int, answer: int, vocab: range, seed: int) -> list[Answered]:
    """One request a stream at once, each with random tokens of its own, greedy, past the end of sequence, nothing cached or streamed."""
    numbers = random.Random(seed)
    bodies = [_request([numbers.choice(vocab) for _ in range(prompt)], answer) for _ in range(streams)]
    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(lambda body: _ask(port, body), bodies))


def _request(tokens: list[int], answer: int) -> bytes:
    greedy = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0}  # no sort of the whole vocabulary
    wish = {"prompt": tokens, "n_predict": answer, "ignore_eos": True, "cache_prompt": False, "stream": False} | greedy
    return json.dumps(wish).encode()


def _ask(port: int, body: bytes) -> Answered:
    status, answer = _call(port, "POST", "/completion", body)
    if status != 200:
        raise BenchError(f"llama-server answered with HTTP status {status}: {answer[:500]!r}")
    return read_completion(answer)


def _call(port: int, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
