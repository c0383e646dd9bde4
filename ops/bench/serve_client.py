"""One client process of `colibri bench serve`: several streams over one channel, each with random tokens of its own.

    python -m ops.bench.serve_client '{"target": ..., "streams": ..., ...}'

Prints "ready" and waits for a line; then "begin" once every stream has had its first message, "end" when the first has had nine tenths of
its answer, and one line of JSON: for each stream [[time.monotonic() of a message, its tokens], ...]. Every message is parsed as it comes,
as clients do.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass

import grpc
import grpc.aio

from colibri.v1 import inference_pb2 as pb
from service.client import generate_request

_METHOD = "/colibri.v1.Inference/Generate"


@dataclass(frozen=True, slots=True)
class ClientWish:
    """What a client process asks for."""

    target: str
    streams: int
    prompt: int
    answer: int
    vocab: int
    seed: int
    interval_ms: int | None = None  # stream_interval_ms of the requests; None: the server's default

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Progress:
    """Says when the measurement begins and ends."""

    def __init__(self, wish: ClientWish) -> None:
        self._waiting = wish.streams
        self._almost = wish.answer * 9 // 10
        self._ended = False

    def tokens(self, count: int, *, first: bool) -> None:
        """A stream has had `count` tokens so far."""
        if first:
            self._waiting -= 1
            if not self._waiting:
                print("begin", flush=True)
        if count >= self._almost:
            self.end()

    def end(self) -> None:
        """The first answer is almost whole."""
        if not self._ended:
            self._ended = True
            print("end", flush=True)


async def stream(channel: grpc.aio.Channel, wish: ClientWish, tokens: list[int], progress: Progress) -> list[tuple[float, int]]:
    """When the messages of one answer came, and how many tokens each had."""
    call: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse] = channel.unary_stream(
        _METHOD, request_serializer=pb.GenerateRequest.SerializeToString, response_deserializer=pb.GenerateResponse.FromString
    )
    request = generate_request(tokens=tokens, max_tokens=wish.answer, temperature=0, ignore_eos=True)
    if wish.interval_ms is not None:
        request.stream_interval_ms = wish.interval_ms
    messages: list[tuple[float, int]] = []
    had = 0
    answer = call(request)
    while (message := await answer.read()) is not grpc.aio.EOF:
        assert isinstance(message, pb.GenerateResponse)
        count = len(message.delta.token_ids)
        if count:
            had += count
            messages.append((time.monotonic(), count))
            progress.tokens(had, first=len(messages) == 1)
    if await answer.code() is not grpc.StatusCode.OK:
        raise RuntimeError(f"a request was not answered: {await answer.details()}")
    return messages


async def run(wish: ClientWish) -> list[list[tuple[float, int]]]:
    """All streams side by side."""
    numbers = random.Random(wish.seed)
    progress = Progress(wish)
    prompts = [[numbers.randrange(wish.vocab) for _ in range(wish.prompt)] for _ in range(wish.streams)]
    async with grpc.aio.insecure_channel(wish.target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        await channel.channel_ready()
        print("ready", flush=True)
        sys.stdin.readline()
        return await asyncio.gather(*(stream(channel, wish, prompt, progress) for prompt in prompts))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(ClientWish(**json.loads(sys.argv[1]))))))
