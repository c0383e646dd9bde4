"""What the peers print, read. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ops.bench.measure import BenchError

_TOGETHER = 0.8  # of the time of all streams together, at least, each must have run

@dataclass(frozen=True, slots=True)
class BenchLine:
    """One test of llama-bench: `prompt` tokens read, or `generated` tokens behind `depth` tokens of context."""

    prompt: int
    generated: int
    depth: int
    tokens_per_second: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """What a llama-server said of one stream."""

    prompt: int  # tokens it computed: fewer than it was given if it had kept some of an earlier prompt
    tokens: int
    seconds: float  # from the first generated token to the last
    prompt_seconds: float  # from when its prompt was begun to its first token
    text: str

    @property
    def rate(self) -> float:
        """Tokens a second of this stream. The first token came with the prompt and took no time of these."""
        return (self.tokens - 1) / self.seconds


def read_llama_bench(text: str) -> list[BenchLine]:
    """The tests of `llama-bench -o json`, whatever is printed around it. BenchError if there is none."""
    begin, end = text.find("[\n"), text.rfind("]")
    try:
        tests = json.loads(text[begin : end + 1]) if 0 <= begin < end else []
        lines = [_line(test) for test in tests]
    except (ValueError, KeyError, TypeError) as cause:
        raise BenchError(f"llama-bench printed something else than its JSON: {cause!r}") from cause
    if not lines:
        raise BenchError(f"llama-bench printed no JSON but: {text[-500:]!r}")
    return lines


def _line(test: Mapping[str, object]) -> BenchLine:
    prompt, generated, depth = int(str(test["n_prompt"])), int(str(test["n_gen"])), int(str(test.get("n_depth", 0)))
    if prompt and generated and str(test.get("test", "")).startswith("tg"):  # ik's -gp: only the generation is timed
        prompt, depth = 0, prompt
    samples = test["samples_ts"]
    if not isinstance(samples, list):
        raise TypeError("samples_ts is no list")
    return BenchLine(prompt, generated, depth, tuple(float(sample) for sample in samples))


def read_completions(body: bytes) -> list[Answered]:
    """The answers to POST /completion of one prompt or several, without streaming. BenchError if it is an error or lacks its timings."""
    try:
        found = json.loads(body)
        return [_answered(message) for message in (found if isinstance(found, list) else [found])]
    except (ValueError, KeyError, TypeError) as cause:
        raise BenchError(f"llama-server answered without timings ({cause!r}): {body[:500]!r}") from cause


def _answered(message: Mapping[str, object]) -> Answered:
    timings = message["timings"]
    if not isinstance(timings, dict):
        raise TypeError("timings is no object")
    seconds, prompt_seconds = float(timings["predicted_ms"]) / 1e3, float(timings["prompt_ms"]) / 1e3
    return Answered(int(timings["prompt_n"]), int(timings["predicted_n"]), seconds, prompt_seconds, str(message["content"]))


def check_answers(answers: Sequence[Answered], *, streams: int, prompt: int, answer: int, seconds: float) -> None:
    """BenchError unless every stream read all of its prompt, said as much as it was asked for, and did so while the others did: all in
    `seconds` altogether."""
    if len(answers) != streams:
        raise BenchError(f"llama-server answered {len(answers)} of {streams} prompts")
    for one in answers:
        if one.tokens != answer or one.tokens < 2 or one.seconds <= 0:
            raise BenchError(f"llama-server generated {one.tokens} tokens of {answer} in {one.seconds:.3f} s")
        if one.prompt != prompt:
            raise BenchError(f"llama-server computed {one.prompt} tokens of a prompt of {prompt}: it kept some or added its own")
    if (share := statistics.median(one.prompt_seconds + one.seconds for one in answers) / seconds) < _TOGETHER:
        raise BenchError(f"llama-server's streams ran for only {share:.0%} of the time each, so not side by side: it needs a slot for each")


def streams_rate(answers: Sequence[Answered]) -> float:
    """Tokens a second of all streams together, once all have begun: their number times the median stream's rate."""
    return len(answers) * statistics.median(answer.rate for answer in answers)


def distinct_words(texts: Iterable[str]) -> float:
    """Of the n-th words of all answers, the share that are different, averaged over n: 1 if no two streams ever said the same at once."""
    columns = list(zip(*(text.split() for text in texts), strict=False))
    return statistics.fmean(len(set(column)) / len(column) for column in columns) if columns else 1.0
