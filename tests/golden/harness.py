"""What the parity and determinism tests share: the golden vectors, and tokens in, logits and routes out of a session."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import engine_c
from workers.team import Team, TeamConfig

MODELS = Path(__file__).parent / "models"
NAMES = tuple(sorted(path.name for path in MODELS.iterdir()))
F32_BOUND = 2e-4  # of f32 logits to transformers', in units of max|logit|: the promise
WEIGHT_BOUND = 1e-5  # of router weights, absolute
KV_BLOCKS = 64  # of the sessions below: room for many short sequences at once

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Tokens = Sequence[int] | I32
Containers = Callable[[str, str], Path]  # the fixture `container` of tests/conftest.py


@dataclass(frozen=True)
class Vectors:
    tokens: I32  # [T]
    logits: F32  # [T, vocab]
    experts: I32  # [L, T, k]
    weights: F32  # [L, T, k]
    greedy: I32  # [24]


@dataclass(frozen=True)
class Trace:
    """What the engine made of a prompt: the same fields as the vectors."""

    logits: F32
    experts: I32
    weights: F32

    def bits(self) -> tuple[bytes, bytes, bytes]:
        return self.logits.tobytes(), self.experts.tobytes(), self.weights.tobytes()


@functools.cache
def vectors(name: str) -> Vectors:
    with np.load(MODELS / name / "vectors.npz") as file:
        return Vectors(**{field: file[field] for field in Vectors.__dataclass_fields__})


def error(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Size of a - b relative to b's: root of the mean square."""
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b))


def distance(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Largest difference of two sets of logits, in units of max|b|."""
    return float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max())


# ---------------------------------------------------------------- sessions


def options(*, max_lanes: int = 0, kv_format: str = "f32", max_rows: int = 128) -> engine_c.SessionOptions:
    return engine_c.SessionOptions(
        max_rows=max_rows,
        max_seqs=min(max_rows, 64),
        max_logit_rows=max_rows,
        kv_blocks=KV_BLOCKS,
        kv_format=engine_c.KV_FORMATS[kv_format],
        max_lanes=max_lanes,
        front_lane=1,
        spin_us=20,
        hang_ms=0,
        trace_routes=1,
    )


@contextlib.contextmanager
def team(path: Path, *, workers: int, kv_format: str = "f32") -> Iterator[engine_c.Session]:
    """The session of a front end with `workers` worker processes of one lane each (0: this process computes alone)."""
    config = TeamConfig(
        load_mode="map",
        workers_per_node=workers,
        threads_per_worker=1,
        front_lane="on",
        session=options(max_lanes=workers, kv_format=kv_format),
    )
    opened = Team.open(path, config)
    try:
        yield opened.session
    finally:
        opened.close()


@contextlib.contextmanager
def threads(path: Path, *, lanes: int, kv_format: str = "f32") -> Iterator[engine_c.Session]:
    """A session whose worker lanes are threads of this process: cheap to start, the same code."""
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(engine_c.Model.open(path))
        session = engine_c.Session(model, options(max_lanes=lanes, kv_format=kv_format))
        stack.callback(session.close)
        for lane in range(lanes):
            session.lane_bind(lane, pid=os.getpid(), pidfd=-1)
            worker = engine_c.Worker(model, session.team_fd, session.arena_fd)
            stack.callback(worker.detach)
            thread = threading.Thread(target=worker.run, args=(lane,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(session.lane_leave, lane)
            wait_for_lane(session, lane)  # a lane that has not attached yet cannot be asked to leave
        yield session


def wait_for_lane(session: engine_c.Session, lane: int) -> None:
    deadline = time.monotonic() + 10
    while session.lane_state(lane) == engine_c.LANE_EMPTY:
        if time.monotonic() > deadline:
            raise TimeoutError(f"lane {lane} does not attach")
        time.sleep(0.0002)


# ---------------------------------------------------------------- running prompts


@dataclass
class Run:
    """A prompt on its way through a session: which tokens have run, in which KV blocks, and what came out."""

    tokens: list[int]
    blocks: Sequence[int]
    done: int = 0
    parts: list[tuple[F32, I32, F32]] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    def work(self, rows: int) -> engine_c.SeqWork:
        return engine_c.SeqWork(tokens=self.tokens[self.done : self.done + rows], start=self.done, blocks=self.blocks, n_logits=rows)

    def trace(self) -> Trace:
        logits, experts, weights = zip(*self.parts, strict=True)
        return Trace(np.concatenate(logits), np.concatenate(experts, axis=1), np.concatenate(weights, axis=1))


def blocks_for(tokens: int) -> int:
    return -(-tokens // engine_c.KV_BLOCK)


def place(prompts: Sequence[Tokens], *, seed: int | None = None) -> list[Run]:
    """Prompts in disjoint KV blocks: in order, or scattered over the pool by `seed`."""
    pool = list(range(KV_BLOCKS)) if seed is None else np.random.default_rng(seed).permutation(KV_BLOCKS).tolist()
    out = []
    for prompt in prompts:
        need = blocks_for(len(prompt))
        out.append(Run([int(token) for token in prompt], pool[:need]))
        pool = pool[need:]
    return out


def step(session: engine_c.Session, parts: Sequence[tuple[Run, int]]) -> None:
    """Runs the next `rows` tokens of each sequence in one step, in the order given."""
    results, _stats = session.step([sequence.work(rows) for sequence, rows in parts])
    assert all(result.ok for result in results), [result.error for result in results]
    total = sum(rows for _sequence, rows in parts)
    logits, (experts, weights) = session.logits(), session.routes(total)
    row = 0
    for sequence, rows in parts:
        span = slice(row, row + rows)
        sequence.parts.append((logits[span], experts[:, span], weights[:, span]))
        sequence.done += rows
        row += rows


def run(session: engine_c.Session, tokens: Tokens, *, chunk: int, seed: int | None = None) -> Trace:
    """One prompt alone, `chunk` tokens a step, its KV blocks placed by `seed`."""
    (sequence,) = place([tokens], seed=seed)
    while sequence.left:
        step(session, [(sequence, min(chunk, sequence.left))])
    return sequence.trace()


def greedy(session: engine_c.Session, tokens: Tokens, count: int) -> list[int]:
    """The engine's own greedy continuation, end-of-sequence ignored."""
    whole = [int(t) for t in tokens]
    blocks = list(range(blocks_for(len(whole) + count)))
    done = 0
    while len(whole) < len(tokens) + count:
        results, _stats = session.step([engine_c.SeqWork(tokens=whole[done:], start=done, blocks=blocks, n_logits=1)])
        done = len(whole)
        whole.append(results[0].rows[0].token)
    return whole[len(tokens) :]


# ---------------------------------------------------------------- checkpoints of our own


def write_checkpoint(folder: Path, config: Mapping[str, object], tensors: Mapping[str, NDArray[np.floating]]) -> None:
    """A Hugging Face folder with one float32 safetensors file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, offset + 4 * tensor.size]}
        offset += 4 * tensor.size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, np.float32).tobytes())


@dataclass(frozen=True)
class Shape:
    """A random Mixtral checkpoint's dimensions."""

    hidden: int
    ffn: int
    layers: int
    kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    experts: int
    top_k: int
    vocab: int
    window: int  # 0 = all positions
    tied: bool

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.kv_heads * self.group,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "vocab_size": self.vocab,
            "sliding_window": self.window or None,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    def tensors(self, seed: int) -> dict[str, F32]:
        """Weights that keep activations near one and spread the gate logits."""
        rng = np.random.default_rng(seed)
        q, kv = self.kv_heads * self.group * self.head_dim, self.kv_heads * self.head_dim

        def matrix(rows: int, columns: int, gain: float = 1.3) -> F32:
            return np.asarray(rng.normal(size=(rows, columns)) * gain / columns**0.5, np.float32)

        def norm() -> F32:
            return rng.normal(1, 0.2, self.hidden).astype(np.float32)

        out = {"model.embed_tokens.weight": matrix(self.vocab, self.hidden, self.hidden**0.5), "model.norm.weight": norm()}
        if not self.tied:
            out["lm_head.weight"] = matrix(self.vocab, self.hidden, 3)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            out |= {prefix + "input_layernorm.weight": norm(), prefix + "post_attention_layernorm.weight": norm()}
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                out[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows, self.hidden)
            out[f"{prefix}self_attn.o_proj.weight"] = matrix(self.hidden, q)
            out[f"{prefix}block_sparse_moe.gate.weight"] = matrix(self.experts, self.hidden, 2)
            for e in range(self.experts):
                expert = f"{prefix}block_sparse_moe.experts.{e}."
                out |= {expert + "w1.weight": matrix(self.ffn, self.hidden), expert + "w3.weight": matrix(self.ffn, self.hidden)}
                out[expert + "w2.weight"] = matrix(self.hidden, self.ffn)
        return out
