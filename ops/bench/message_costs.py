"""What it costs to make the messages of an answer, measured by themselves on the service's own code."""

from __future__ import annotations

import random
import time
from pathlib import Path

from engine_c import GREEDY, Model, RowResult
from ops.bench.breakdown import Costs
from service.answer import Answer
from service.artifact import read_artifact
from service.messages import Narrator
from service.plan import Update
from service.request import Request
from service.tokenizer import Tokenizer


def message_costs(path: Path, *, tokens: int) -> Costs:
    """Microseconds a token over `tokens` random ones, one message each. Without a tokenizer there is no text."""
    artifact = read_artifact(path)
    tokenizer = Tokenizer(artifact.tokenizer) if artifact.tokenizer is not None else None
    with Model.open(path) as model:
        numbers = random.Random(1)
        ids = [numbers.randrange(model.info.vocab) for _ in range(tokens)]
    detokenise = 0.0
    if tokenizer is not None:
        tokenizer.decode(ids)  # the table of token bytes fills up
        continuation = tokenizer.continuation()
        begin = time.perf_counter()
        for token in ids:
            continuation.feed(token)
        detokenise = time.perf_counter() - begin
    told = _narrate(ids, tokenizer)
    scale = 1e6 / tokens
    return Costs(detokenise=detokenise * scale, message=max(0.0, told - detokenise) * scale)


def _narrate(ids: list[int], tokenizer: Tokenizer | None) -> float:
    """Seconds to make the messages, from news to bytes."""
    request = Request("cost", (1,), GREEDY, max_tokens=len(ids) + 1)
    answer = Answer(None if tokenizer is None else tokenizer.continuation())
    narrator = Narrator(request, answer, logprobs=False, bytes_of=lambda _: b"")
    updates = [[Update(request, rows=(RowResult(token, 0.0, 0.0, -1, ()),))] for token in ids]
    begin = time.perf_counter()
    for update in updates:
        narrator.absorb(update)
        narrator.take_delta()
    return time.perf_counter() - begin
