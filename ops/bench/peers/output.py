"""What the peers print, read. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ops.bench.measure import BenchError

_TOGETHER = 0.8  # of a stream's time, at least, all others must generate too

@dataclass(frozen=True, slots=True)
class BenchLine:
    """One test of llama-bench: `prompt` tokens read, or `generated` tokens behind `depth` tokens of context."""

    prompt: int
    generated: int
    depth: int
    tokens_per_second: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """What a llama-server said of one request."""

    prompt: int  # tokens it computed: fewer than it was given if it had kept some of an earlier prompt
    tokens: int
    seconds: float  # from the first generated token to the last
    text: str
    ended: float = 0.0  # time.monotonic() when the answer came

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


def read_completion(body: bytes, *, ended: float = 0.0) -> Answered:
    """The answer to POST /completion without streaming. BenchError if it is an error or lacks its timings."""
    try:
        message = json.loads(body)
        timings = message["timings"]
        seconds = float(timings["predicted_ms"]) / 1e3
        return Answered(int(timings["prompt_n"]), int(timings["predicted_n"]), seconds, str(message["content"]), ended)
    except (ValueError, KeyError, TypeError) as cause:
        raise BenchError(f"llama-server answered without timings ({cause!r}): {body[:500]!r}") from cause


def check_answers(answers: Sequence[Answered], *, prompt: int, answer: int) -> None:
    """BenchError unless every stream read all of its prompt, said as much as it was asked for, and did so while the others did."""
    for one in answers:
        if one.tokens != answer or one.tokens < 2 or one.seconds <= 0:
            raise BenchError(f"llama-server generated {one.tokens} tokens of {answer} in {one.seconds:.3f} s")
        if one.prompt != prompt:
            raise BenchError(f"llama-server computed {one.prompt} tokens of a prompt of {prompt}: it kept some or added its own")
    if (share := together(answers)) < _TOGETHER:
        raise BenchError(f"llama-server's streams ran side by side for only {share:.0%} of their time; it needs a slot for each")


def together(answers: Sequence[Answered]) -> float:
    """The time in which all streams generated, as a share of the median stream's."""
    first, last = max(one.ended - one.seconds for one in answers), min(one.ended for one in answers)
    return max(0.0, last - first) / statistics.median(one.seconds for one in answers)


def streams_rate(answers: Sequence[Answered]) -> float:
    """Tokens a second of all streams together: their number times the median stream's rate. A stream that was let in before the others, and
    so waited through their prompts, does not count against the engine."""
    return len(answers) * statistics.median(answer.rate for answer in answers)


def distinct_words(texts: Iterable[str]) -> float:
    """Of the n-th words of all answers, the share that are different, averaged over n: 1 if no two streams ever said the same at once."""
    columns = list(zip(*(text.split() for text in texts), strict=False))
    return statistics.fmean(len(set(column)) / len(column) for column in columns) if columns else 1.0
