"""The engines that are compared, each with the same two verbs: read a prompt, and generate with so many streams. All generate behind the
same context, the same number of tokens, different ones in every stream."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ops.bench.bandwidth import Meter
from ops.bench.limits import MachineLimits
from ops.bench.measure import OURS, Row
from ops.bench.peers.gguf_model import FIRST_WORD
from ops.bench.peers.llama_server import ask_streams, running
from ops.bench.peers.output import distinct_words, streams_rate
from ops.bench.peers.programs import Peer, llama_bench
from ops.bench.peers.torch_process import TorchProcess
from ops.bench.steps import BURST_STEPS, BenchConfig, bench_decode, bench_prefill

TORCH = "torch grouped_mm BF16"
_SERVED_TOKENS = 128  # a gRPC stream's answer, at least: its window leaves out the beginning and the end


@dataclass(frozen=True, slots=True)
class Case:
    """streams 0: a prompt of `context` tokens is read; else so many streams generate `answer` tokens each behind `context` tokens."""

    name: str
    streams: int
    context: int
    answer: int


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens a second, and what else is known."""

    rate: float
    details: Mapping[str, float]


class Engine(Protocol):
    """Runs one case at a time; between cases it computes nothing."""

    @property
    def name(self) -> str: ...

    def run(self, case: Case, *, seed: int) -> Result | None:
        """None if it can't do this case."""


@dataclass(frozen=True, slots=True)
class Ours:
    """Whole steps through the scheduler and worker processes."""

    name: str
    path: Path
    config: BenchConfig
    meter: Meter
    limits: MachineLimits

    def run(self, case: Case, *, seed: int) -> Result:
        """The engine's own benches, as `colibri bench prefill` and `batch` run them."""
        if not case.streams:
            config = replace(self.config, samples=1, seed=seed)
            row = bench_prefill(self.path, config, tokens=case.context, meter=self.meter, limits=self.limits)
        else:
            config = replace(self.config, samples=-(-case.answer // BURST_STEPS), seed=seed)
            row = bench_decode(
                self.path, config, streams=case.streams, prompt=case.context, meter=self.meter, limits=self.limits
            )
        rate = statistics.harmonic_mean(row.samples)  # bursts of equally many steps: all tokens over all of the time
        return Result(rate, {"of limit": rate / row.limit if row.limit else 0.0} | _some(row, "distinct"))


@dataclass(frozen=True, slots=True)
class OurService:
    """`colibri serve` and its gRPC clients, all on the same cores."""

    path: Path
    config: BenchConfig
    meter: Meter
    limits: MachineLimits
    name: str = f"{OURS} gRPC"

    def run(self, case: Case, *, seed: int) -> Result | None:
        """Several streams at clients; reading prompts is not separated from the rest."""
        from ops.bench.serve import ServeCase, bench_serve

        if not case.streams:
            return None
        wish = ServeCase(streams=case.streams, prompt=case.context, answer=max(_SERVED_TOKENS, case.answer))
        config = replace(self.config, samples=1, seed=seed)
        rows = bench_serve(self.path, config, wish, meter=self.meter, limits=self.limits)
        row = next(row for row in rows if row.case.startswith("gRPC"))
        return Result(row.median, {"of engine": row.share or 0.0})


@dataclass(frozen=True, slots=True)
class LlamaPrograms:
    """llama-bench for prompts and one stream; llama-server, which can give every stream its own tokens, for more."""

    peer: Peer
    kind: str
    model: Path
    threads: int
    vocab: int

    @property
    def name(self) -> str:
        return f"{self.peer.name} {self.kind}"

    def run(self, case: Case, *, seed: int) -> Result:
        """Starts the program, and ends it."""
        if case.streams > 1:
            return self._served(case, seed)
        generation = self.peer.generation(context=case.context, answer=case.answer)
        options = generation if case.streams else self.peer.prompt(tokens=case.context)
        line = llama_bench(self.peer, self.model, threads=self.threads, options=options)
        return Result(statistics.median(line.tokens_per_second), {})

    def _served(self, case: Case, seed: int) -> Result:
        words = range(FIRST_WORD, self.vocab)
        tokens = case.context + case.answer
        with running(self.peer, self.model, streams=case.streams, tokens=tokens, threads=self.threads) as server:
            ask_streams(server, streams=case.streams, prompt=8, answer=8, vocab=words, seed=0)  # warms up
            answers = ask_streams(
                server, streams=case.streams, prompt=case.context, answer=case.answer, vocab=words, seed=seed
            )
        return Result(streams_rate(answers), {"distinct": distinct_words(answer.text for answer in answers)})


@dataclass(frozen=True, slots=True)
class Torch:
    """transformers on torch, in an interpreter of its own that keeps the model between cases."""

    process: TorchProcess
    name: str = TORCH

    def run(self, case: Case, *, seed: int) -> Result:
        """One forward pass a step over all streams."""
        facts = self.process.ask({"do": "run", "streams": case.streams, "context": case.context, "answer": case.answer, "seed": seed})
        return Result(facts["rate"], {"distinct": facts["distinct"]} if case.streams else {})


def _some(row: Row, *names: str) -> dict[str, float]:
    return {name: row.details[name] for name in names if name in row.details}
