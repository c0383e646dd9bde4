"""Perplexity of a text under a model: what a weight format costs, measured on the engine itself.

    colibri bench perplexity TEXT MODEL.colibri [MODEL.colibri ...]

The text is tokenised with each model's own tokenizer and cut into windows; in each every token but the first is predicted from those before
it in the window. If the model's prompts begin with a certain token, that stands in the first one's place. With several models the first is
the one the others are compared with, token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine_c import KV_BLOCK, KV_FORMATS, SeqWork, SessionOptions
from ops.container import Container
from service.artifact import read_artifact
from workers.team import Team, TeamConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WINDOW = 512  # tokens
CHUNK = 64  # rows of a step


class PerplexityError(Exception):
    """The text or the model cannot be scored; the sentence says why."""


@dataclass(frozen=True)
class Score:
    """How a model predicted a text, one entry a scored token."""

    logprobs: NDArray[np.float64]  # of the text's own token, natural
    best: NDArray[np.int32]  # the model's most likely token
    hits: float  # share of tokens that were the most likely

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs.mean()))


def encode(path: Path, text: str) -> tuple[list[int], int | None]:
    """Token ids of a text by the tokenizer embedded in a container, without special tokens, and the token its prompts begin with."""
    from tokenizers import Tokenizer

    with Container.open(path) as container:
        tokenizer = Tokenizer.from_str(container.blob("tokenizer.json").decode())
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids, read_artifact(path).generation.first_token


def score(path: Path, tokens: Sequence[int], *, window: int = WINDOW, kv_format: str = "f32", first: int | None = None) -> Score:
    """Scores a text's tokens; `first` stands in place of each window's first. Raises PerplexityError if there are fewer than two."""
    import numpy as np

    if len(tokens) < 2:
        raise PerplexityError(f"a text of {len(tokens)} tokens predicts nothing; two are the least")
    options = SessionOptions(
        max_rows=CHUNK, max_seqs=1, max_logit_rows=CHUNK, kv_blocks=-(-window // KV_BLOCK), kv_format=KV_FORMATS[kv_format], hang_ms=0
    )
    logprobs: list[float] = []
    best: list[int] = []
    ranks: list[int] = []
    with Team.open(path, TeamConfig(session=options)) as team:
        for start in range(0, len(tokens) - 1, window):
            part = list(tokens[start : start + window + 1])
            if first is not None:
                part[0] = first
            for step in _steps(part):
                ((result,), _stats) = team.session.step([step])
                if not result.ok:
                    raise PerplexityError(f"{path}: {result.error}")
                logprobs += [row.target_logprob for row in result.rows]
                best += [row.token for row in result.rows]
                ranks += [row.target_rank for row in result.rows]
    return Score(np.asarray(logprobs), np.asarray(best, np.int32), float(np.mean(np.asarray(ranks) == 0)))


def _steps(tokens: Sequence[int]) -> Iterator[SeqWork]:
    """The prefill chunks of one window; each row's target is the token after it."""
    blocks = range(-(-(len(tokens) - 1) // KV_BLOCK))
    for start in range(0, len(tokens) - 1, CHUNK):
        end = min(start + CHUNK, len(tokens) - 1)
        yield SeqWork(tokens=tokens[start:end], start=start, blocks=blocks, n_logits=end - start, targets=tokens[start + 1 : end + 1])


def compare(paths: Sequence[Path], text: str, *, window: int, kv_format: str) -> Iterator[str]:
    """One line of a Markdown table a model."""
    import numpy as np

    yield "| model | file, MB | tokens | perplexity | against the first | same most likely token | mean difference of log-probability |"
    yield "|---|---|---|---|---|---|---|"
    first: Score | None = None
    for path in paths:
        tokens, begin = encode(path, text)
        result = score(path, tokens, window=window, kv_format=kv_format, first=begin)
        first = first or result
        change = 100 * (result.perplexity / first.perplexity - 1)
        same = 100 * float(np.mean(result.best == first.best))
        apart = float(np.abs(result.logprobs - first.logprobs).mean())
        size = f"{path.stem} | {path.stat().st_size / 1e6:.0f} | {len(result.logprobs)}"
        yield f"| {size} | {result.perplexity:.3f} | {change:+.2f} % | {same:.1f} % | {apart:.4f} |"
