"""Whether a request may join the queue: refused at once is what could never run, has no room, or would come too late. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from service.blocks import blocks_for
from service.faults import DeadlineExpired, DeadlineUnmeetable, InvalidField, QueueFull
from service.plan import Limits
from service.request import Request


@dataclass(frozen=True, slots=True)
class Queue:
    """What a request finds before it."""

    requests: int  # waiting
    tokens: int  # of their prompts
    rows: int  # prompt rows that have to run first
    rate: float  # of them, a second; 0 while unknown
    busy: bool  # whether anything runs or waits


def check_fits(request: Request, *, limits: Limits, blocks: int) -> None:
    """Raises InvalidField for what could not run alone in `blocks` KV blocks."""
    if request.pending < 1:
        raise InvalidField("input", "a prompt needs at least one token, a text to score two")
    needed = blocks_for(request.most_tokens)
    if needed > blocks:
        sentence = f"{request.most_tokens} tokens of prompt and answer need {needed} KV blocks, the server has {blocks}"
        raise InvalidField("max_tokens", f"{sentence}; ask for fewer or start the server with more KV memory")
    if len(request.prompt) > limits.max_queue_tokens:
        raise InvalidField("input", f"{len(request.prompt)} prompt tokens; the queue takes {limits.max_queue_tokens}")


def check_queue(request: Request, *, limits: Limits, queue: Queue) -> None:
    """Raises QueueFull."""
    if queue.requests >= limits.max_queue:
        raise QueueFull(f"{queue.requests} requests wait already, the limit", retry_after=_retry_after(queue))
    if queue.tokens + len(request.prompt) > limits.max_queue_tokens:
        limit = limits.max_queue_tokens
        sentence = f"{queue.tokens} prompt tokens wait already, {len(request.prompt)} more would pass the limit of {limit}"
        raise QueueFull(sentence, retry_after=_retry_after(queue))


def check_deadline(request: Request, *, queue: Queue, now: float) -> None:
    """Raises DeadlineExpired or DeadlineUnmeetable."""
    if request.deadline is None:
        return
    remaining = request.deadline - now
    if remaining <= 0:
        raise DeadlineExpired
    if queue.rate > 0 and queue.busy:
        predicted = (queue.rows + request.pending) / queue.rate
        if predicted > remaining:
            raise DeadlineUnmeetable(predicted=predicted, remaining=remaining)


def _retry_after(queue: Queue) -> float:
    """Seconds until about half of the queue has gone; between a quarter of a second and 30."""
    seconds = queue.tokens / 2 / queue.rate if queue.rate > 0 else 1.0
    return min(max(seconds, 0.25), 30.0)
