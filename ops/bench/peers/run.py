"""Ours and the peers on the same shape: every case in turn (A B A B), different tokens in every stream."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ops.bench.bandwidth import Meter
from ops.bench.limits import MachineLimits
from ops.bench.measure import OURS, BenchError, Row, figure
from ops.bench.peers.compare import Board
from ops.bench.peers.engines import TORCH, Case, Engine, LlamaPrograms, Ours, OurService, Torch
from ops.bench.peers.gguf_model import write_gguf
from ops.bench.peers.noise import others, usage, wait_quiet
from ops.bench.peers.programs import Peer, quantise
from ops.bench.peers.torch_process import TorchProcess, TorchWish
from ops.bench.steps import BenchConfig
from ops.random_model import ModelShape, make_model

KINDS = {"int4": ("Q4_0",), "int8": ("Q8_0",), "bf16": ("BF16", "F16")}
"""What the peers are given against each of our formats."""
SMALL_PAGES = f"{OURS} 4K pages"
"""Ours on the file's own pages instead of a copy on huge ones."""
_SHORT_REPEATS = 3  # samples a round of one stream behind a short context: each takes a fraction of a second
_DISTURBED = 0.15  # of the CPUs used by others: the sample is taken again
_TRIES = 3
_QUIET_SECONDS = 20.0  # waited for others to become quiet

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PeersWish:
    """What is compared."""

    shape: ModelShape
    name: str  # of the shape, for files
    quant: str
    peers: tuple[Peer, ...]
    folder: Path  # models are made here, once
    prefill: tuple[int, ...] = (512,)
    streams: tuple[int, ...] = (1, 8, 32)
    prompt: int = 64
    answer: int = 64
    depth: int = 0
    rounds: int = 3
    threads: int = 0  # 0: one a CPU
    grpc: bool = False
    small_pages: bool = False
    torch_python: Path | None = None
    budget: float = 0.0  # seconds; no round is begun that would not end within them; 0: none
    only: tuple[str, ...] = ()  # engines whose name begins with one of these; none: all

    def wants(self, engine: str) -> bool:
        """Whether an engine of this name is to be run."""
        return not self.only or engine.startswith(self.only)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The files to run."""

    ours: Path
    theirs: tuple[tuple[Peer, str, Path], ...]  # peer, kind, file


def bench_peers(wish: PeersWish, config: BenchConfig, *, meter: Meter, limits: MachineLimits, say: Say) -> list[Row]:
    """One sample a round and engine for every case, with the plain reading speed just before and after it. `say` hears every sample."""
    board = Board()
    begin = time.monotonic()
    with engines(wish, config, meter=meter, limits=limits, say=say) as found:
        for number in range(1, wish.rounds + 1):
            _round(found, wish, number, board, meter, say)
            spent = time.monotonic() - begin
            if wish.budget and spent + spent / number > wish.budget and number < wish.rounds:
                say(f"{number} of {wish.rounds} rounds took {spent:.0f} s; another would not fit {wish.budget:.0f} s")
                break
    return board.rows()


def _round(found: list[Engine], wish: PeersWish, number: int, board: Board, meter: Meter, say: Say) -> None:
    for case in cases(wish):
        for _ in range(_SHORT_REPEATS if case.streams == 1 and case.context == wish.prompt else 1):
            for engine in found:
                _sample(engine, case, number, board, meter, say)


def _sample(engine: Engine, case: Case, number: int, board: Board, meter: Meter, say: Say) -> None:
    """One sample, begun when others are quiet; again if they disturbed it. The least disturbed counts."""
    cpus = os.cpu_count() or 1
    tries: list[tuple[float, float, dict[str, float]]] = []
    while len(tries) < _TRIES and (not tries or tries[-1][0] > _DISTURBED):
        wait_quiet(_DISTURBED, cpus=cpus, patience=_QUIET_SECONDS)
        before, begin = statistics.median(meter.read()), usage()
        result = engine.run(case, seed=number)
        end, after = usage(), statistics.median(meter.read())
        if result is None:
            return
        noise = others(begin, end, cpus=cpus)
        seen = f"plain read {before:.1f} and {after:.1f} GB/s, others used {noise:.0%} of the CPUs, took {end.at - begin.at:.1f} s"
        say(f"round {number}, {case.name}, {engine.name}: {figure(result.rate)} tokens/s; {seen}")
        tries.append((noise, result.rate, {"read GB/s": (before + after) / 2, "others": noise} | dict(result.details)))
    _noise, rate, details = min(tries, key=lambda one: one[0])
    facts = {"streams": float(case.streams)} if case.streams else {"tokens": float(case.context)}
    board.add(case.name, engine.name, rate, facts | details)


def cases(wish: PeersWish) -> list[Case]:
    """Prompts, then streams behind a short context, then one stream behind a long one."""
    found = [Case(f"prefill {tokens}", 0, tokens, 0) for tokens in wish.prefill]
    for streams in wish.streams:
        found.append(Case(f"decode, {streams} stream" + ("s" if streams > 1 else ""), streams, wish.prompt, wish.answer))
    if wish.depth:
        found.append(Case(f"decode behind {wish.depth}", 1, wish.depth, wish.answer))
    return found


def prepare(wish: PeersWish, say: Say) -> Prepared:
    """Makes the models that are not there yet."""
    wish.folder.mkdir(parents=True, exist_ok=True)
    ours = wish.folder / f"{wish.name}-{wish.quant}.colibri"
    if wish.wants(OURS) and not ours.exists():
        say(f"making {ours}")
        make_model(ours, wish.shape, quant=wish.quant)
    wanted = [(peer, kind) for peer in wish.peers for kind in KINDS[wish.quant] if wish.wants(f"{peer.name} {kind}")]
    source = wish.folder / f"{wish.name}.gguf"
    if wanted and not source.exists():
        say(f"making {source}")
        write_gguf(source, wish.shape)
    return Prepared(ours, tuple((peer, kind, quantise(peer, source, kind, threads=threads_of(wish))) for peer, kind in wanted))


def threads_of(wish: PeersWish) -> int:
    """As many as ours has lanes, unless told otherwise."""
    return wish.threads or len(os.sched_getaffinity(0))


@contextmanager
def engines(wish: PeersWish, config: BenchConfig, *, meter: Meter, limits: MachineLimits, say: Say) -> Iterator[list[Engine]]:
    """All that are wanted, with their models made. BenchError if none is."""
    prepared = prepare(wish, say)
    found: list[Engine] = [Ours(OURS, prepared.ours, config, meter, limits)]
    if wish.small_pages:
        found.append(Ours(SMALL_PAGES, prepared.ours, replace(config, load="map"), meter, limits))
    if wish.grpc:
        found.append(OurService(prepared.ours, config, meter, limits))
    threads, vocab = threads_of(wish), wish.shape.vocab
    found += [LlamaPrograms(peer, kind, model, threads, vocab) for peer, kind, model in prepared.theirs]
    with ExitStack() as stack:
        if wish.torch_python is not None and wish.wants(TORCH):
            say("torch: making its model")
            found.append(Torch(stack.enter_context(TorchProcess(TorchWish(wish.torch_python, threads, wish.shape)))))
        if not (found := [engine for engine in found if wish.wants(engine.name)]):
            raise BenchError(f"--engines {','.join(wish.only)} leaves none to run")
        yield found
