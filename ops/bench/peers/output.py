"""What the peers print, read. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ops.bench.measure import BenchError


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

    tokens: int
    seconds: float  # from the first generated token to the last
    text: str

    @property
    def rate(self) -> float:
        """Tokens a second of this stream, as the server itself counts: the first token, which took no time of these, included."""
        return self.tokens / self.seconds


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


def read_completion(body: bytes) -> Answered:
    """The answer to POST /completion without streaming. BenchError if it is an error or lacks its timings."""
    try:
        message = json.loads(body)
        timings = message["timings"]
        return Answered(int(timings["predicted_n"]), float(timings["predicted_ms"]) / 1e3, str(message["content"]))
    except (ValueError, KeyError, TypeError) as cause:
        raise BenchError(f"llama-server answered without timings ({cause!r}): {body[:500]!r}") from cause


def streams_rate(answers: Sequence[Answered]) -> float:
    """Tokens a second of all streams together: their number times the median stream's rate. A stream that was let in before the others, and
    so waited through their prompts, does not count against the engine."""
    return len(answers) * statistics.median(answer.rate for answer in answers)


def distinct_words(texts: Iterable[str]) -> float:
    """Of the n-th words of all answers, the share that are different, averaged over n: 1 if no two streams ever said the same at once."""
    columns = list(zip(*(text.split() for text in texts), strict=False))
    return statistics.fmean(len(set(column)) / len(column) for column in columns) if columns else 1.0
