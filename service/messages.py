"""News of a request to the messages its caller gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from colibri.v1 import inference_pb2 as pb
from engine_c import RowResult
from service.answer import Answer
from service.faults import Fault
from service.plan import Update
from service.request import Reason, Request

_REASONS = {Reason.STOP: pb.FINISH_REASON_STOP, Reason.LENGTH: pb.FINISH_REASON_LENGTH}
TokenBytes = Callable[[int], bytes]


def token_logprob(token: int, logprob: float, row: RowResult, bytes_of: TokenBytes) -> pb.TokenLogprob:
    """A token's log-probability and the alternatives reported with it."""
    top = [pb.TopLogprob(token_id=other, logprob=value, bytes=bytes_of(other)) for other, value in row.top]
    return pb.TokenLogprob(token_id=token, logprob=logprob, bytes=bytes_of(token), top=top)


def timings(request: Request, *, now: float) -> pb.Timings:
    """Where a request's time went so far; what has not begun counts nothing."""
    started = now if request.started is None else request.started
    first = now if request.first_token is None else request.first_token
    last = first if request.last_token is None else request.last_token
    return pb.Timings(
        queue_ms=1000 * (started - request.arrived),
        prefill_ms=1000 * (first - started) if request.started is not None else 0.0,
        decode_ms=1000 * (last - first),
    )


class Narrator:
    """Tells one answer. `absorb` takes news, `take_delta` gives what is to be sent, `finish` the end once `ended`."""

    def __init__(self, request: Request, answer: Answer, *, logprobs: bool, bytes_of: TokenBytes) -> None:
        self.request = request
        self.ended = False
        self.fault: Fault | None = None
        self.reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
        self._answer = answer
        self._logprobs = logprobs
        self._bytes_of = bytes_of
        self._stop_token: int | None = None
        self._message = pb.GenerateResponse()  # made once and filled anew: building one costs more than all else here
        self._delta = self._message.delta
        self._text: list[str] = []
        self._tokens: list[int] = []

    @property
    def tokens(self) -> int:
        """Tokens told."""
        return self._answer.tokens

    def absorb(self, updates: Sequence[Update]) -> None:
        """Takes news in order; what comes behind a stop string is not part of the answer. A fault ends it, what came before it counts."""
        for update in updates:
            if update.fault is not None:
                self.ended, self.fault = True, update.fault
                return
            self._absorb_rows(update.rows)
            if self.ended:
                return
            if update.reason is not None:
                self._end(update)
                return

    def take_delta(self) -> bytes | None:
        """What has come since the last one, if anything: a GenerateResponse as it is sent."""
        text = "".join(self._text)
        if not self._tokens and not text:
            return None
        delta = self._delta
        delta.text = text
        delta.token_ids.extend(self._tokens)
        raw = self._message.SerializeToString()
        self._text.clear()
        self._tokens.clear()
        del delta.token_ids[:]
        del delta.logprobs[:]
        return raw

    def finish(self, *, model: str, request_id: str, now: float) -> bytes:
        """The terminal message: a GenerateResponse as it is sent."""
        request = self.request
        usage = pb.Usage(prompt_tokens=len(request.prompt), completion_tokens=self.tokens, cached_tokens=request.cached)
        message = pb.Finish(reason=self.reason, usage=usage, timings=timings(request, now=now), seed=request.sampling.seed)
        message.model, message.request_id = model, request_id
        message.rerouted, message.routed = request.rerouted, request.routed
        if self._answer.matched is not None:
            message.stop_string = self._answer.matched
        elif self._stop_token is not None:
            message.stop_token_id = self._stop_token
        return pb.GenerateResponse(finish=message).SerializeToString()

    def _absorb_rows(self, rows: Sequence[RowResult]) -> None:
        for row in rows:
            self._text.append(self._answer.feed(row.token))
            self._tokens.append(row.token)
            if self._logprobs:
                self._delta.logprobs.append(token_logprob(row.token, row.logprob, row, self._bytes_of))
            if self._answer.matched is not None:
                self.ended, self.reason = True, pb.FINISH_REASON_STOP
                return

    def _end(self, update: Update) -> None:
        self.ended = True
        self._text.append(self._answer.finish())
        if self._answer.matched is not None:
            self.reason = pb.FINISH_REASON_STOP
            return
        self.reason = _REASONS[update.reason] if update.reason is not None else pb.FINISH_REASON_UNSPECIFIED
        if update.reason is Reason.STOP:
            self._stop_token = update.rows[-1].token


def score_response(request: Request, rows: Sequence[RowResult], *, model: str, bytes_of: TokenBytes, now: float) -> pb.ScoreResponse:
    """The answer to Score: one row a token but the first."""
    response = pb.ScoreResponse(token_ids=request.prompt, model=model, timings=timings(request, now=now))
    response.usage.prompt_tokens = len(request.prompt)
    response.rerouted, response.routed = request.rerouted, request.routed
    response.total_logprob = sum(row.target_logprob for row in rows)
    for token, row in zip(request.prompt[1:], rows, strict=True):
        response.scores.add(token=token_logprob(token, row.target_logprob, row, bytes_of), rank=row.target_rank)
    return response
