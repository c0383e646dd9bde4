"""Steady load: streams that ask for known answers one after the other, check every token and note when nothing came."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from colibri.v1 import inference_pb2 as pb
from service.client import Client, generate_request

NOTABLE = 0.01
"""Seconds between two tokens from which a pause is noted."""


class Answer(NamedTuple):
    """What must not change."""

    text: str
    tokens: tuple[int, ...]


class Pause(NamedTuple):
    """Nothing came to a stream from begin to end (time.monotonic)."""

    begin: float
    end: float


SHAPES = ((1, 200), (40, 120), (150, 60), (6, 330), (20, 40), (90, 200), (3, 12), (60, 250), (12, 90), (200, 160), (2, 280))


def requests(shapes: Sequence[tuple[int, int]] = SHAPES) -> list[pb.GenerateRequest]:
    """Short and long prompts, short and long answers, greedy and sampled. shapes: tokens of each prompt and its answer."""
    return [
        generate_request(
            "".join(chr(97 + (7 * i + 5 * j) % 26) for j in range(length)),
            max_tokens=tokens,
            temperature=0.0 if i % 2 else 0.8,
            seed=i,
            ignore_eos=True,
        )
        for i, (length, tokens) in enumerate(shapes)
    ]


def request(*, prompt: int = 5, tokens: int = 100, seed: int = 1) -> pb.GenerateRequest:
    """A sampled answer to a prompt of so many tokens."""
    ids = [3 + (7 * i + seed) % 900 for i in range(prompt)]
    return generate_request(tokens=ids, max_tokens=tokens, temperature=0.8, seed=seed, ignore_eos=True)


def tokens_of(responses: Iterable[pb.GenerateResponse]) -> tuple[int, ...]:
    """All tokens of an answer that came in pieces."""
    return tuple(token for response in responses for token in response.delta.token_ids)


def answers(target: str, *, timeout: float) -> list[Answer]:
    """Each request answered alone."""
    return answers_to(requests(), target, timeout=timeout)


def answers_to(todo: Sequence[pb.GenerateRequest], target: str, *, timeout: float) -> list[Answer]:
    """Each of these answered alone."""
    with Client(target, timeout=timeout) as client:
        completions = [client.complete(request) for request in todo]
    return [Answer(completion.text, completion.token_ids) for completion in completions]


@dataclass
class Stream:
    """One caller's record."""

    calls: int = 0
    tokens: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pauses: deque[Pause] = field(default_factory=lambda: deque(maxlen=2000))


class Load:
    """Streams in threads of their own, from start() to stop()."""

    def __init__(
        self,
        target: str,
        expected: Sequence[Answer],
        *,
        streams: int,
        timeout: float,
        todo: Sequence[pb.GenerateRequest] = (),
        patient: bool = False,
    ) -> None:
        """todo: what is asked, requests() unless given. patient: by a client that is."""
        self.streams = [Stream() for _ in range(streams)]
        self._expected = expected
        self._todo = todo or requests()
        self._client = Client(target, timeout=timeout, patient=patient)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), name=f"stream-{i}") for i in range(streams)]

    def start(self) -> None:
        """Begins to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Asks no more; returns when the answers under way are complete."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    @property
    def tokens(self) -> int:
        """Received so far."""
        return sum(stream.tokens for stream in self.streams)

    def troubles(self) -> int:
        """Calls so far that failed or were wrong."""
        return sum(len(stream.failed) + len(stream.wrong) for stream in self.streams)

    def longest_pause(self, begin: float, end: float) -> float:
        """Seconds of the longest pause that overlaps this time; 0 if none was notable."""
        found = (p.end - p.begin for s in self.streams for p in list(s.pauses) if p.end > begin and p.begin < end)
        return max(found, default=0.0)

    def _run(self, index: int) -> None:
        stream, todo = self.streams[index], self._todo
        turn = index
        while not self._stopping.is_set():
            which = turn % len(todo)
            turn += len(self.streams) + 1
            try:
                answer = self._ask(stream, todo[which])
            except grpc.RpcError as error:
                stream.failed.append(f"{error.code().name}: {error.details()}")
                self._stopping.wait(0.1)
                continue
            stream.calls += 1
            if answer != self._expected[which]:
                stream.wrong.append(_difference(which, answer, self._expected[which]))

    def _ask(self, stream: Stream, request: pb.GenerateRequest) -> Answer:
        tokens: list[int] = []
        text, finishes = "", 0
        last = time.monotonic()
        for event in self._client.generate(request):
            now = time.monotonic()
            if now - last > NOTABLE:
                stream.pauses.append(Pause(last, now))
            last = now
            if isinstance(event, pb.Finish):
                finishes += 1
                continue
            text += event.text
            tokens += event.token_ids
            stream.tokens += len(event.token_ids)
        if finishes != 1:
            stream.wrong.append(f"{finishes} final messages")
        return Answer(text, tuple(tokens))


def _difference(which: int, answer: Answer, expected: Answer) -> str:
    pairs = zip(answer.tokens, expected.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(answer.tokens), len(expected.tokens)))
    return f"request {which}: differs from token {at}: {answer.tokens[at : at + 3]} for {expected.tokens[at : at + 3]}"
