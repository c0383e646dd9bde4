"""What the streams of a judgement read: held-out texts of several kinds, a token a stream and step, none read twice.

A stream reads excerpts one after the other. The first is shorter than the others, by another amount in every stream, so that streams do not
begin anew in the same step. Everything is fixed by the arguments: two runs over the same traffic can be compared token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.bench.measure import BenchError
from ops.bench.perplexity import encode

CONTEXT = 512  # tokens of an excerpt
STREAMS = 16
STEPS = 2048
MIXED, SHIFTING = "mixed", "shifting"
ROUNDS = 2  # how often shifting traffic comes to each kind

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Texts:
    """Held-out texts as a model's own tokens."""

    kinds: Mapping[str, Ints]
    first: int | None = None  # what the model's prompts begin with


@dataclass(frozen=True, slots=True)
class Traffic:
    """What every stream reads in every step: arrays [steps, streams]."""

    name: str
    kinds: tuple[str, ...]
    tokens: Ints
    targets: Ints  # the token after each
    positions: Ints  # 0 where an excerpt begins
    excerpts: Ints  # number of the excerpt, over all streams
    kind: Ints  # index into kinds

    @property
    def steps(self) -> int:
        return len(self.tokens)

    @property
    def streams(self) -> int:
        return int(self.tokens.shape[1])


@dataclass(frozen=True, slots=True)
class _Reading:
    """A part of one text that a stream reads from step `step` on, `length` tokens."""

    kind: str
    begin: int
    step: int
    length: int


def load_texts(model: Path, folder: Path) -> Texts:
    """Every .txt of a folder; the file's name is the kind."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise BenchError(f"{folder} has no .txt files: name a folder of held-out texts, one file a kind")
    kinds: dict[str, Ints] = {}
    first = None
    for file in files:
        ids, first = encode(model, file.read_text(encoding="utf-8"))
        kinds[file.stem] = np.asarray(ids, np.int32)
    return Texts(kinds, first)


def names(texts: Texts) -> tuple[str, ...]:
    """What traffic there is for these texts."""
    return (MIXED, SHIFTING, *texts.kinds) if len(texts.kinds) > 1 else tuple(texts.kinds)


def make_traffic(name: str, texts: Texts, *, streams: int = STREAMS, steps: int = STEPS, context: int = CONTEXT) -> Traffic:
    """mixed: stream i reads kind i mod kinds, all at once; shifting: all streams read the same kind, which changes, each kind coming ROUNDS
    times; the name of a kind: that alone. Fewer steps than asked for are made if a text would otherwise be read twice. BenchError."""
    kinds = tuple(texts.kinds)
    if name not in names(texts):
        raise BenchError(f"no traffic {name!r}: one of {', '.join(names(texts))}")
    if name == MIXED:
        phases: Sequence[Sequence[str]] = [kinds]
    elif name == SHIFTING:
        phases = [(kind,) for kind in kinds] * ROUNDS
    else:
        phases = [(name,)]
    length = min(steps // len(phases), _most_steps(texts, phases, streams))
    if length < 2:
        raise BenchError(f"the texts are too short for {streams} streams of {name} traffic; give longer ones")
    readings = [list(_readings(texts, phases, length, stream, streams)) for stream in range(streams)]
    return _lay_out(name, texts, readings, length * len(phases), context)


def _readers(phases: Sequence[Sequence[str]], streams: int) -> dict[str, list[tuple[int, int]]]:
    """(phase, stream) of everybody who reads a kind."""
    readers: dict[str, list[tuple[int, int]]] = {}
    for index, kinds in enumerate(phases):
        for stream in range(streams):
            readers.setdefault(kinds[stream % len(kinds)], []).append((index, stream))
    return readers


def _most_steps(texts: Texts, phases: Sequence[Sequence[str]], streams: int) -> int:
    """Steps a phase may have, so that the readers of a text have parts of their own; the last token is only predicted."""
    return min((len(texts.kinds[kind]) - 1) // len(readers) for kind, readers in _readers(phases, streams).items())


def _readings(texts: Texts, phases: Sequence[Sequence[str]], length: int, stream: int, streams: int) -> list[_Reading]:
    readers = _readers(phases, streams)
    found = []
    for index, kinds in enumerate(phases):
        kind = kinds[stream % len(kinds)]
        place = readers[kind].index((index, stream))
        found.append(_Reading(kind, place * ((len(texts.kinds[kind]) - 1) // len(readers[kind])), index * length, length))
    return found


def _lay_out(name: str, texts: Texts, readings: Sequence[Sequence[_Reading]], steps: int, context: int) -> Traffic:
    streams = len(readings)
    kinds = tuple(texts.kinds)
    tokens, targets, positions, excerpts, kind = (np.zeros((steps, streams), np.int32) for _ in range(5))
    count = 0
    for stream, parts in enumerate(readings):
        for part in parts:
            done = 0
            while done < part.length:
                whole = context if done else max(2, context * (stream + 1) // streams)
                rows = min(whole, part.length - done)
                at = slice(part.step + done, part.step + done + rows)
                tokens[at, stream], targets[at, stream] = _excerpt(texts, part.kind, part.begin + done, rows)
                positions[at, stream] = np.arange(rows)
                excerpts[at, stream] = count
                kind[at, stream] = kinds.index(part.kind)
                done += rows
                count += 1
    return Traffic(name, kinds, tokens, targets, positions, excerpts, kind)


def _excerpt(texts: Texts, kind: str, begin: int, rows: int) -> tuple[Ints, Ints]:
    """Tokens and the token after each. With a first token that is read before the text, whose tokens are then all predicted."""
    text = texts.kinds[kind]
    if texts.first is None:
        return text[begin : begin + rows], text[begin + 1 : begin + rows + 1]
    return np.concatenate((np.asarray([texts.first], np.int32), text[begin : begin + rows - 1])), text[begin : begin + rows]

