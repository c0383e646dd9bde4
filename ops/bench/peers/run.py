"""Ours and the peers on the same shape, in turn (A B A B), different tokens in every stream."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ops.bench.bandwidth import Meter
from ops.bench.limits import MachineLimits
from ops.bench.measure import OURS, Row
from ops.bench.peers.compare import Board
from ops.bench.peers.gguf_model import FIRST_WORD, write_gguf
from ops.bench.peers.llama_server import ask_streams, running
from ops.bench.peers.output import distinct_words, streams_rate
from ops.bench.peers.programs import Peer, llama_bench, quantise
from ops.bench.steps import BenchConfig, bench_decode, bench_prefill
from ops.random_model import ModelShape, make_model

KINDS = {"int4": ("Q4_0",), "int8": ("Q8_0",), "bf16": ("BF16", "F16")}
"""What the peers are given against each of our formats."""

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
    streams: tuple[int, ...] = (1, 4, 8, 16, 32)
    prompt: int = 64
    answer: int = 64
    depth: int = 0
    rounds: int = 3
    threads: int = 0  # 0: one a CPU
    grpc: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """The files to run."""

    ours: Path
    theirs: tuple[tuple[Peer, str, Path], ...]  # peer, kind, file


def bench_peers(wish: PeersWish, config: BenchConfig, *, meter: Meter, limits: MachineLimits, say: Say) -> list[Row]:
    """One sample a round and engine for every case. `say` hears what is being done."""
    prepared = prepare(wish, say)
    board = Board()
    for number in range(1, wish.rounds + 1):
        say(f"round {number} of {wish.rounds}: {OURS}")
        _our_round(prepared.ours, wish, replace(config, samples=1), board, meter, limits)
        for peer, kind, model in prepared.theirs:
            say(f"round {number} of {wish.rounds}: {peer.name} {kind}")
            _peer_round(peer, kind, model, wish, board, seed=number)
    return board.rows()


def prepare(wish: PeersWish, say: Say) -> Prepared:
    """Makes the models that are not there yet."""
    wish.folder.mkdir(parents=True, exist_ok=True)
    ours = wish.folder / f"{wish.name}-{wish.quant}.colibri"
    if not ours.exists():
        say(f"making {ours}")
        make_model(ours, wish.shape, quant=wish.quant)
    source = wish.folder / f"{wish.name}.gguf"
    if not source.exists():
        say(f"making {source}")
        write_gguf(source, wish.shape)
    theirs = []
    for peer in wish.peers:
        for kind in KINDS[wish.quant]:
            say(f"{peer.name}: {kind}")
            theirs.append((peer, kind, quantise(peer, source, kind, threads=threads_of(wish))))
    return Prepared(ours, tuple(theirs))


def threads_of(wish: PeersWish) -> int:
    """As many as ours has lanes, unless told otherwise."""
    return wish.threads or len(os.sched_getaffinity(0))


def _our_round(path: Path, wish: PeersWish, config: BenchConfig, board: Board, meter: Meter, limits: MachineLimits) -> None:
    for tokens in wish.prefill:
        row = bench_prefill(path, config, tokens=tokens, meter=meter, limits=limits)
        board.add(prefill_case(tokens), OURS, row.median, {"read GB/s": row.details["read GB/s"], "of limit": row.share or 0.0})
    for streams, prompt, case in _decodes(wish):
        row = bench_decode(path, config, streams=streams, prompt=prompt, meter=meter, limits=limits)
        facts = {name: row.details[name] for name in ("read GB/s", "distinct")}
        board.add(case, OURS, row.median, facts | {"streams": streams, "of limit": row.share or 0.0})
    if wish.grpc:
        _our_service(path, wish, config, board, meter, limits)


def _our_service(path: Path, wish: PeersWish, config: BenchConfig, board: Board, meter: Meter, limits: MachineLimits) -> None:
    from ops.bench.serve import ServeCase, bench_serve

    for streams in wish.streams:
        case = ServeCase(streams=streams, prompt=wish.prompt, answer=max(64, wish.answer))
        _engine, row, *_ = bench_serve(path, config, case, meter=meter, limits=limits)
        board.add(decode_case(streams), f"{OURS} gRPC", row.median, {"streams": streams})


def _peer_round(peer: Peer, kind: str, model: Path, wish: PeersWish, board: Board, *, seed: int) -> None:
    engine, threads = f"{peer.name} {kind}", threads_of(wish)
    for line in llama_bench(peer, model, threads=threads, prompts=wish.prefill, generated=wish.answer, depth=wish.depth):
        value = statistics.median(line.tokens_per_second)
        if not line.generated:
            board.add(prefill_case(line.prompt), engine, value)
        else:
            board.add(depth_case(line.depth) if line.depth else decode_case(1), engine, value, {"streams": 1})
    words = range(FIRST_WORD, wish.shape.vocab)
    for streams in (count for count in wish.streams if count > 1):
        with running(peer, model, streams=streams, tokens=wish.prompt + wish.answer, threads=threads) as port:
            ask_streams(port, streams=streams, prompt=8, answer=4, vocab=words, seed=0)  # warms up
            answers = ask_streams(port, streams=streams, prompt=wish.prompt, answer=wish.answer, vocab=words, seed=seed)
        facts = {"streams": float(streams), "distinct": distinct_words(answer.text for answer in answers)}
        board.add(decode_case(streams), engine, streams_rate(answers), facts)


def _decodes(wish: PeersWish) -> Sequence[tuple[int, int, str]]:
    """(streams, tokens of context, case) of our decoding."""
    cases = [(streams, wish.prompt, decode_case(streams)) for streams in wish.streams]
    return [*cases, (1, wish.depth, depth_case(wish.depth))] if wish.depth else cases


def prefill_case(tokens: int) -> str:
    return f"prefill {tokens}"


def decode_case(streams: int) -> str:
    return f"decode, {streams} stream" + ("s" if streams > 1 else "")


def depth_case(depth: int) -> str:
    return f"decode behind {depth}"

