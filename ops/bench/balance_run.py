"""Runs traffic through the engine in this process, with or without a policy, and says what came of it. To be used as a library:

    with Judge.open(path) as judge:
        traffic = make_traffic("mixed", load_texts(path, folder))
        print(judge.evaluate(traffic, Damping(...)))

Nothing it finds but `seconds` depends on the machine or its load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from engine_c import KV_BLOCK, KV_FORMATS, LANE_ACTIVE, LANE_READY, Damping, Model, SeqWork, Session, SessionOptions, Worker
from ops.bench.balance_stats import Change, Floats, QueueStats, change, perplexity, queue_stats, queues, relative
from ops.bench.balance_traffic import CONTEXT, STREAMS, Traffic
from ops.bench.measure import BenchError

_LANE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave, by step and stream."""

    logprobs: Floats  # [steps, streams] of the text's own next token
    experts: NDArray[np.int16]  # [steps, layers, streams, k]
    rerouted: NDArray[np.int32]  # [steps, streams] layers in which the policy changed the token's experts
    seconds: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """A policy on one kind of traffic, beside the same run without it."""

    traffic: str
    tokens: int
    perplexity: float
    change: Change  # of perplexity, over all tokens
    by_kind: dict[str, Change]
    rerouted: float  # share of the (token, layer) pairs
    moved: float  # share of the choices (token, layer, rank) that are experts the same run without the policy did not choose
    queue: QueueStats
    undamped: QueueStats
    seconds: float

    @property
    def longest_variance(self) -> float:
        """How much larger the variance of the longest queue is, as a share."""
        return relative(self.queue.longest_variance, self.undamped.longest_variance)

    @property
    def variance(self) -> float:
        """How much larger the variance of queues is, as a share."""
        return relative(self.queue.variance, self.undamped.variance)

    def __str__(self) -> str:
        queue = self.queue
        return (
            f"{self.traffic}: perplexity {self.perplexity:.3f} ({self.change.share:+.2%} +- {self.change.error:.2%}), "
            f"rerouted {self.rerouted:.1%}, queue variance {queue.variance:.2f} ({self.variance:+.0%}), longest {queue.longest:.2f}, "
            f"its variance {queue.longest_variance:.2f} ({self.longest_variance:+.0%}), active {queue.active:.2f}, {self.seconds:.1f} s"
        )


class Judge:
    """A model opened in this process, and the undamped outcome of every traffic it has seen."""

    def __init__(self, model: Model, options: SessionOptions, *, context: int) -> None:
        self.model = model
        self._options = options
        self._blocks = -(-context // KV_BLOCK)
        self._undamped: dict[int, tuple[Traffic, Outcome]] = {}

    @classmethod
    def open(cls, path: Path, *, streams: int = STREAMS, context: int = CONTEXT, lanes: int = 1) -> Self:
        """lanes: threads that compute, this one included. EngineError, BenchError."""
        options = SessionOptions(
            max_rows=streams,
            max_seqs=streams,
            max_logit_rows=streams,
            kv_blocks=streams * -(-context // KV_BLOCK),
            kv_format=KV_FORMATS["bf16"],
            max_lanes=lanes - 1,
            hang_ms=0,
            trace_routes=1,
            max_slots=streams,
        )
        model = Model.open(path)
        if context > model.info.max_context:
            model.close()
            raise BenchError(f"excerpts of {context} tokens do not fit the model's context of {model.info.max_context}")
        return cls(model, options, context=context)

    def close(self) -> None:
        """Frees everything."""
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(self, traffic: Traffic, damping: Damping | None = None) -> Outcome:
        """Every token of the traffic, one of each stream a step, in a session of its own: nothing remains of earlier runs."""
        with Session(self.model, self._options) as session, _lanes(session):
            return self._run(session, traffic, damping)

    def _run(self, session: Session, traffic: Traffic, damping: Damping | None) -> Outcome:
        info, streams = self.model.info, traffic.streams
        blocks = [range(stream * self._blocks, (stream + 1) * self._blocks) for stream in range(streams)]
        logprobs = np.zeros((traffic.steps, streams))
        experts = np.zeros((traffic.steps, info.router_layers, streams, info.top_k), np.int16)
        rerouted = np.zeros((traffic.steps, streams), np.int32)
        begin = time.perf_counter()
        rows = zip(traffic.tokens.tolist(), traffic.targets.tolist(), traffic.positions.tolist(), strict=True)
        for step, (tokens, targets, positions) in enumerate(rows):
            work = [
                SeqWork((token,), position, part, n_logits=1, targets=(target,), damping=damping, slot=slot)
                for slot, (token, target, position, part) in enumerate(zip(tokens, targets, positions, blocks, strict=True))
            ]
            results, _ = session.step(work)
            for stream, result in enumerate(results):
                if not result.ok:
                    raise BenchError(f"step {step}, stream {stream}: {result.error}")
                logprobs[step, stream] = result.rows[0].target_logprob
                rerouted[step, stream] = result.rerouted
            experts[step] = session.routes(streams)[0]
        return Outcome(logprobs, experts, rerouted, time.perf_counter() - begin)

    def undamped(self, traffic: Traffic) -> Outcome:
        """The run without a policy, made once."""
        if id(traffic) not in self._undamped:
            self._undamped[id(traffic)] = traffic, self.run(traffic)
        return self._undamped[id(traffic)][1]

    def evaluate(self, traffic: Traffic, damping: Damping | None) -> Judgement:
        """Runs the traffic under a policy and compares."""
        base = self.undamped(traffic)
        return judge_outcome(traffic, self.run(traffic, damping), base, experts=self.model.info.experts)


@contextmanager
def _lanes(session: Session) -> Iterator[None]:
    """Threads of this process that compute all lanes but the front end's own."""
    with ExitStack() as stack:
        for lane in range(session.options.max_lanes):
            session.lane_bind(lane, pid=0, pidfd=-1)
            worker = stack.enter_context(Worker(session.model, session.team_fd, session.arena_fd))
            thread = threading.Thread(target=worker.run, args=(lane,), daemon=True)
            thread.start()
            stack.callback(_end_lane, session, lane, thread)
            deadline = time.monotonic() + _LANE_SECONDS
            while session.lane_state(lane) not in (LANE_READY, LANE_ACTIVE):
                if time.monotonic() > deadline or not thread.is_alive():
                    raise BenchError(f"lane {lane} did not begin to compute within {_LANE_SECONDS:.0f} s")
                time.sleep(0.001)
        yield


def _end_lane(session: Session, lane: int, thread: threading.Thread) -> None:
    session.lane_leave(lane)
    thread.join()


def judge_outcome(traffic: Traffic, outcome: Outcome, base: Outcome, *, experts: int) -> Judgement:
    """What an outcome says beside that of the same traffic without a policy."""
    by_kind = {}
    for index, kind in enumerate(traffic.kinds):
        if (mask := traffic.kind == index).any():
            by_kind[kind] = change(outcome.logprobs[mask], base.logprobs[mask], traffic.excerpts[mask])
    kept = (outcome.experts[..., :, None] == base.experts[..., None, :]).any(axis=-1)
    pairs = outcome.rerouted.size * outcome.experts.shape[1]
    return Judgement(
        traffic=traffic.name,
        tokens=outcome.logprobs.size,
        perplexity=perplexity(outcome.logprobs),
        change=change(outcome.logprobs, base.logprobs, traffic.excerpts),
        by_kind=by_kind,
        rerouted=float(outcome.rerouted.sum()) / pairs,
        moved=1 - float(kept.mean()),
        queue=queue_stats(queues(outcome.experts, count=experts)),
        undamped=queue_stats(queues(base.experts, count=experts)),
        seconds=outcome.seconds,
    )
