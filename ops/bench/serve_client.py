"""One client process of `colibri bench serve`: several streams over one channel, each with random tokens of its own.

    python -m ops.bench.serve_client '{"target": ..., "streams": ..., ...}'

Prints "ready" and waits for a line; then "begin" once every stream has had its first message, "end" when the first has had nine tenths of
its answer, and one line of JSON: for each stream [[time.monotonic() of a message, its tokens], ...]. Messages are kept as bytes, read last.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass

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

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Progress:
    """Says when the measurement begins and ends."""

    def __init__(self, wish: ClientWish) -> None:
        self._waiting = wish.streams
        self._almost = wish.answer * 9 // 10
        self._ended = False

    def message(self, count: int) -> None:
        """A stream has had its count-th message; a message has one token as a rule."""
        if count == 1:
            self._waiting -= 1
            if not self._waiting:
                print("begin", flush=True)
        if count >= self._almost:
            self.end()

    def end(self) -> None:
        """The first answer is almost whole, or all of it is there in fewer messages than it has tokens."""
        if not self._ended:
            self._ended = True
            print("end", flush=True)


async def stream(channel: grpc.aio.Channel, wish: ClientWish, tokens: list[int], progress: Progress) -> list[tuple[float, bytes]]:
    """Everything one answer sent, and when."""
    call: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, bytes] = channel.unary_stream(
        _METHOD, request_serializer=pb.GenerateRequest.SerializeToString, response_deserializer=None
    )
    request = generate_request(tokens=tokens, max_tokens=wish.answer, temperature=0, ignore_eos=True)
    messages: list[tuple[float, bytes]] = []
    async for message in call(request):
        messages.append((time.monotonic(), message))
        progress.message(len(messages))
    progress.end()
    return messages


def token_times(messages: list[tuple[float, bytes]]) -> list[tuple[float, int]]:
    """(time, tokens) of the messages that carry tokens."""
    parsed = ((at, len(pb.GenerateResponse.FromString(raw).delta.token_ids)) for at, raw in messages)
    return [(at, count) for at, count in parsed if count]


async def run(wish: ClientWish) -> list[list[tuple[float, int]]]:
    """All streams side by side."""
    numbers = random.Random(wish.seed)
    progress = Progress(wish)
    prompts = [[numbers.randrange(wish.vocab) for _ in range(wish.prompt)] for _ in range(wish.streams)]
    async with grpc.aio.insecure_channel(wish.target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        await channel.channel_ready()
        print("ready", flush=True)
        sys.stdin.readline()
        answers = await asyncio.gather(*(stream(channel, wish, prompt, progress) for prompt in prompts))
    return [token_times(messages) for messages in answers]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(ClientWish(**json.loads(sys.argv[1]))))))
