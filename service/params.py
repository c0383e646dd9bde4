"""Request messages to what the scheduler takes: every parameter checked, the field named that is wrong."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from colibri.v1 import inference_pb2 as pb
from engine_c.structs import MAX_TOP_LOGPROBS, Sampling
from service.artifact import Generation
from service.faults import InvalidField

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
_MAX_CHARS_PER_TOKEN = 64
_MAX_UTF8 = 4  # bytes of a character
_LEAST_MESSAGE_BYTES = 1 << 20
_MAX_INTERVAL_MS = 1000
_STOP_INTERVAL = 0.05  # seconds that tokens may be held if a stop string may be among them
_SEED_BITS = 53  # a made-up seed survives JSON clients


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the model and the server allow."""

    vocab: int
    max_context: int
    default_max_tokens: int
    generation: Generation

    @property
    def chars(self) -> int:
        """Of a prompt. A longer text cannot fit the context unless it is degenerate; it is refused before it is encoded."""
        return self.max_context * _MAX_CHARS_PER_TOKEN

    @property
    def message_bytes(self) -> int:
        """Of a request: room for the longest prompt as text, tokens or chat. Memory is bounded by this times the calls at once."""
        return max(_LEAST_MESSAGE_BYTES, self.chars * _MAX_UTF8)


@dataclass(frozen=True, slots=True)
class Stops:
    """When to stop early."""

    strings: tuple[str, ...]
    token_ids: frozenset[int]
    include_string: bool


def read_sampling(message: pb.Sampling, *, defaults: Generation, top_logprobs: int) -> Sampling:
    """How tokens are chosen, unset fields filled in. Raises InvalidField."""
    return Sampling(
        temperature=_number(message, "temperature", defaults.temperature, 0.0, 100.0),
        top_p=_number(message, "top_p", defaults.top_p, 0.0, 1.0, open_low=True),
        min_p=_number(message, "min_p", 0.0, 0.0, 1.0, open_high=True),
        repetition_penalty=_number(message, "repetition_penalty", 1.0, 0.0, 100.0, open_low=True),
        top_k=_top_k(message, defaults),
        top_logprobs=top_logprobs,
        seed=message.seed if message.HasField("seed") else secrets.randbits(_SEED_BITS),
    )


def _number(
    message: pb.Sampling, name: str, default: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> float:
    if not message.HasField(name):
        return default
    value = float(getattr(message, name))
    inside = low <= value <= high and not (open_low and value == low) and not (open_high and value == high)
    if not math.isfinite(value) or not inside:
        interval = f"{'above' if open_low else 'at least'} {low:g} and {'below' if open_high else 'at most'} {high:g}"
        raise InvalidField(f"sampling.{name}", f"is {value:g}; it must be {interval}")
    return value


def _top_k(message: pb.Sampling, defaults: Generation) -> int:
    if not message.HasField("top_k"):
        return defaults.top_k
    if message.top_k > 2**31 - 1:
        raise InvalidField("sampling.top_k", f"is {message.top_k}; it must be below 2147483648 (0 is off)")
    return message.top_k


def read_top_logprobs(message: pb.GenerateRequest | pb.ScoreRequest) -> int | None:
    """How many alternatives to report; None if the field is unset."""
    if not message.HasField("top_logprobs"):
        return None
    if message.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidField("top_logprobs", f"is {message.top_logprobs}; it must be from 0 to {MAX_TOP_LOGPROBS}")
    return message.top_logprobs


def read_stops(message: pb.StopConditions, *, bounds: Bounds, has_tokenizer: bool) -> Stops:
    """When to stop early. Raises InvalidField."""
    if len(message.strings) > MAX_STOPS:
        raise InvalidField("stop.strings", f"has {len(message.strings)} entries; at most {MAX_STOPS} are allowed")
    for index, text in enumerate(message.strings):
        if not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
            raise InvalidField(f"stop.strings[{index}]", f"has {len(text.encode())} bytes; it must have 1 to {MAX_STOP_BYTES}")
    if message.strings and not has_tokenizer:
        raise InvalidField("stop.strings", "this model has no tokenizer; use stop.token_ids")
    if len(message.token_ids) > MAX_STOP_TOKENS:
        raise InvalidField("stop.token_ids", f"has {len(message.token_ids)} entries; at most {MAX_STOP_TOKENS} are allowed")
    check_tokens("stop.token_ids", message.token_ids, vocab=bounds.vocab)
    ends = () if message.ignore_eos else bounds.generation.eos_token_ids
    return Stops(tuple(message.strings), frozenset([*message.token_ids, *ends]), message.include_string)


def check_tokens(field: str, tokens: Sequence[int], *, vocab: int) -> None:
    """Raises InvalidField unless every id is in the vocabulary."""
    if tokens and max(tokens) >= vocab:
        index = next(i for i, token in enumerate(tokens) if token >= vocab)
        raise InvalidField(f"{field}[{index}]", f"is {tokens[index]}; the vocabulary ends at {vocab - 1}")


def read_max_tokens(message: pb.GenerateRequest, *, prompt_tokens: int, field: str, bounds: Bounds) -> int:
    """How many tokens to generate at most. `field` is the one the prompt came in. Raises InvalidField."""
    room = bounds.max_context - prompt_tokens
    if room < 1:
        raise InvalidField(field, f"has {prompt_tokens} tokens; with an answer of at least one, {bounds.max_context - 1} fit the context")
    if not message.HasField("max_tokens"):
        return min(bounds.default_max_tokens, room)
    if message.max_tokens < 1:
        raise InvalidField("max_tokens", "is 0; it must be at least 1")
    if message.max_tokens > room:
        fits = f"with the prompt's {prompt_tokens} tokens at most {room} fit the context of {bounds.max_context}"
        raise InvalidField("max_tokens", f"is {message.max_tokens}; {fits}")
    return message.max_tokens


def read_stream_interval(message: pb.GenerateRequest) -> float | None:
    """Seconds tokens may be held; None: as the server has it. Raises InvalidField.

    Without a stream nothing needs to be told before the end, but a stop string must be found soon.
    """
    if message.stream_interval_ms > _MAX_INTERVAL_MS:
        raise InvalidField("stream_interval_ms", f"is {message.stream_interval_ms}; it can be at most {_MAX_INTERVAL_MS}")
    given = message.stream_interval_ms / 1000 if message.HasField("stream_interval_ms") else None
    if message.HasField("stream") and not message.stream:
        given = _MAX_INTERVAL_MS / 1000
    if given is not None and message.stop.strings:
        return min(given, _STOP_INTERVAL)
    return given
