"""Plain values that go into and come out of the engine. Field names and meanings are colibri.h's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine_c.routing import Damping, Routes

FORMATS = {"f32": 0, "bf16": 1, "int8": 2, "int4": 3}
KV_FORMATS = {"f32": 0, "bf16": 1}
KV_BLOCK = 16
MAX_TOP_LOGPROBS = 20

LANE_EMPTY, LANE_READY, LANE_ACTIVE, LANE_LEAVING, LANE_DEAD = range(5)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Scalars of an opened model (colibri_model_info)."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    experts: int
    top_k: int
    max_context: int
    sliding_window: int
    router_layers: int
    tied_head: int
    expert_format: int
    backbone_format: int
    head_format: int
    norm_eps: float
    attention_scale: float
    file_bytes: int
    expert_bytes: int
    backbone_bytes: int
    active_bytes: int


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Sizes and waiting times of a session (colibri_session_options). kv_blocks 0 means "to be planned" (workers.plan)."""

    max_rows: int = 512
    max_seqs: int = 64
    max_logit_rows: int = 64
    kv_blocks: int = 0
    kv_format: int = KV_FORMATS["bf16"]
    max_lanes: int = 0
    front_lane: int = 1
    spin_us: int = 50
    hang_ms: int = 1000
    trace_routes: int = 0
    split_down: int = 0
    max_slots: int = 0

    def as_tuple(self) -> tuple[int, ...]:
        """In the order of the C struct."""
        return (
            self.max_rows, self.max_seqs, self.max_logit_rows, self.kv_blocks, self.kv_format,
            self.max_lanes, self.front_lane, self.spin_us, self.hang_ms, self.trace_routes, self.split_down,
            self.max_slots,
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen (colibri_sampling). The default is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    top_logprobs: int = 0
    seed: int = 0

    def as_tuple(self) -> tuple[float | int, ...]:
        """In the order of the C struct."""
        return self.temperature, self.top_p, self.min_p, self.repetition_penalty, self.top_k, self.top_logprobs, self.seed


GREEDY = Sampling()


@dataclass(slots=True)
class SeqWork:
    """One sequence's share of a step.

    tokens run at positions start..start+len(tokens)-1; blocks are the ids of all its KV blocks so far (a list that is given again may only
    have grown); the last n_logits rows are sampled and reported. targets, if given, has n_logits entries, -1 for none.
    slot: the sequence's routing state, 0..max_slots-1, its own from position 0 on; damping of scope "sequence" needs one.
    routes: its routes are wanted, which a session that traces routes can give.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    n_logits: int = 0
    sampling: Sampling = GREEDY
    history: Sequence[int] = ()
    targets: Sequence[int] | None = None
    damping: Damping | None = None
    slot: int = -1
    routes: bool = False


class RowResult(NamedTuple):
    """What a row with logits gave. Log-probabilities are natural, of the model's own distribution."""

    token: int
    logprob: float
    target_logprob: float
    target_rank: int
    top: tuple[tuple[int, float], ...]


class SeqResult(NamedTuple):
    """A sequence's rows, or why they must not be used. rerouted: (token, layer) pairs whose experts damping changed."""

    ok: bool
    error: str
    rows: tuple[RowResult, ...]
    rerouted: int = 0
    routes: Routes | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """Where a step's time went (colibri_step_stats)."""

    step_ns: int
    wait_ns: int
    serial_ns: int
    phases: int
    tasks: int
    tasks_rerun: int
    lanes: int
    lanes_lost: int
    tasks_homed: int
    tasks_local: int
    remote_layers: int  # handed out,
    remote_ns: int  # and how long the step then waited
    op_ns: tuple[int, ...]
    """By operation, in the order of OPERATIONS."""


PathLike = str | os.PathLike[str]
