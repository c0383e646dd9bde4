"""A thin synchronous client of colibri.v1.Inference and colibri.v1.Experts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from colibri.v1 import experts_pb2, experts_pb2_grpc, inference_pb2 as pb, inference_pb2_grpc

Message = tuple[str, str] | Mapping[str, str]
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.keepalive_time_ms", 30_000)]
PATIENCE = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": "colibri.v1.Inference"},
        "methodConfig": [
            {
                "name": [{}],
                "waitForReady": True,
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.2s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
    }
)
"""What any gRPC client may be given as its service config so that restarts of front ends cost no call: calls go round the front ends that
say they are ready, wait while none is, and are asked anew after UNAVAILABLE, which says that nothing of them ran. Give calls a deadline."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[pb.TokenLogprob, ...]
    finish: pb.Finish


def chat(messages: Sequence[Message]) -> pb.Chat:
    """(role, content) pairs, or mappings with those keys, as a message."""
    turns = [(m["role"], m["content"]) if isinstance(m, Mapping) else m for m in messages]
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


def generate_request(
    text: str | None = None,
    *,
    tokens: Sequence[int] | None = None,
    messages: Sequence[Message] | None = None,
    model: str = "",
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool | None = None,
    top_logprobs: int | None = None,
    stream: bool | None = None,
    routing: pb.RoutingPolicy | None = None,
) -> pb.GenerateRequest:
    """A GenerateRequest from plain values; None leaves a field unset. Exactly one of text, tokens and messages."""
    return pb.GenerateRequest(
        model=model,
        text=text,
        tokens=None if tokens is None else pb.TokenIds(ids=tokens),
        chat=None if messages is None else chat(messages),
        sampling=pb.Sampling(
            temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, repetition_penalty=repetition_penalty, seed=seed
        ),
        stop=pb.StopConditions(strings=stop, token_ids=stop_token_ids, ignore_eos=ignore_eos),
        max_tokens=max_tokens,
        top_logprobs=top_logprobs,
        stream=stream,
        routing=routing,
    )


def route_request(
    text: str | None = None,
    *,
    tokens: Sequence[int] | None = None,
    messages: Sequence[Message] | None = None,
    model: str = "",
    layers: Sequence[int] = (),
    routing: pb.RoutingPolicy | None = None,
) -> experts_pb2.RouteRequest:
    """A RouteRequest from plain values. Exactly one of text, tokens and messages."""
    return experts_pb2.RouteRequest(
        model=model,
        text=text,
        tokens=None if tokens is None else pb.TokenIds(ids=tokens),
        chat=None if messages is None else chat(messages),
        layers=layers,
        routing=routing,
    )


class Client:
    """Talks to one server. Failures are grpc.RpcError, its code() and details() for people. For any number of threads."""

    def __init__(self, target: str = "localhost:50051", *, timeout: float | None = None, patient: bool = False) -> None:
        """`timeout`: seconds a call may take, None for no limit. `patient`: see PATIENCE; for several front ends the target is a name
        that means all of them, dns:///NAME:PORT, or ipv4:ADDRESS:PORT,ADDRESS:PORT."""
        self.timeout = timeout
        options: list[tuple[str, str | int]] = [("grpc.service_config", PATIENCE)] if patient else []
        self.channel = grpc.insecure_channel(target, options=[*_OPTIONS, *options])
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        self.experts = experts_pb2_grpc.ExpertsStub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls."""
        self.channel.close()

    def wait_ready(self, timeout: float) -> None:
        """Waits until the server can be reached. Raises grpc.FutureTimeoutError."""
        grpc.channel_ready_future(self.channel).result(timeout)

    def generate(
        self, request: pb.GenerateRequest, *, timeout: float | None = None, request_id: str = ""
    ) -> Iterator[pb.Delta | pb.Finish]:
        """Deltas as they come, then one Finish. Closing the iterator cancels the call. See generate_request."""
        metadata = (("x-request-id", request_id),) if request_id else None
        call = self.stub.Generate(request, timeout=self.timeout if timeout is None else timeout, metadata=metadata)
        try:
            for response in call:
                yield response.finish if response.HasField("finish") else response.delta
        finally:
            call.cancel()

    def complete(self, request: pb.GenerateRequest, *, timeout: float | None = None) -> Completion:
        """The whole answer at once."""
        text: list[str] = []
        tokens: list[int] = []
        logprobs: list[pb.TokenLogprob] = []
        finish = pb.Finish()
        for event in self.generate(request, timeout=timeout):
            if isinstance(event, pb.Finish):
                finish = event
            else:
                text.append(event.text)
                tokens += event.token_ids
                logprobs += event.logprobs
        return Completion("".join(text), tuple(tokens), tuple(logprobs), finish)

    def score(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        top_logprobs: int | None = None,
        routing: pb.RoutingPolicy | None = None,
    ) -> pb.ScoreResponse:
        """Log-probabilities of a text's tokens."""
        ids = None if tokens is None else pb.TokenIds(ids=tokens)
        request = pb.ScoreRequest(text=text, tokens=ids, top_logprobs=top_logprobs, routing=routing)
        return self.stub.Score(request, timeout=self.timeout)

    def route(self, request: experts_pb2.RouteRequest, *, timeout: float | None = None) -> experts_pb2.RouteResponse:
        """The experts of a text's tokens. See route_request."""
        return self.experts.Route(request, timeout=self.timeout if timeout is None else timeout)

    def tokenize(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self.stub.Tokenize(request, timeout=self.timeout).token_ids)

    def tokenize_chat(self, messages: Sequence[Message]) -> pb.TokenizeResponse:
        """A conversation as tokens and as the text it was rendered to."""
        return self.stub.Tokenize(pb.TokenizeRequest(chat=chat(messages)), timeout=self.timeout)

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        """The text of tokens."""
        request = pb.DetokenizeRequest(token_ids=tokens, skip_special_tokens=skip_special_tokens)
        return self.stub.Detokenize(request, timeout=self.timeout).text

    def model(self, name: str = "") -> pb.Model:
        """What a model is."""
        return self.stub.GetModel(pb.GetModelRequest(model=name), timeout=self.timeout).model

    def models(self) -> list[pb.Model]:
        """All models served."""
        return list(self.stub.ListModels(pb.ListModelsRequest(), timeout=self.timeout).models)
