"""Logits, routes and greedy tokens of a prompt, computed by a team exactly as the service computes them: for parity with a reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine_c import KV_BLOCK, KV_FORMATS, SeqWork, SessionOptions
from workers.team import Team, TeamConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_CHUNK = 512


class LogitsError(Exception):
    """The prompt does not fit the model, or the model gave no numbers."""


@dataclass(frozen=True, slots=True)
class LogitsResult:
    """What `colibri logits` writes. T tokens, N greedy tokens, L layers that have a router, k experts a token."""

    logits: NDArray[np.float32]  # [T, vocab]
    layers: NDArray[np.int32]  # [L] indices of the layers that have a router
    experts: NDArray[np.int32]  # [L, T, k] by descending gate score
    weights: NDArray[np.float32]  # [L, T, k] the factor each expert's output is multiplied with
    greedy: NDArray[np.int32]  # [N] end-of-sequence ignored


def compute_logits(
    path: Path, *, tokens: Sequence[int], greedy: int = 0, workers: int = 0, chunk: int | None = None, kv_format: str = "f32"
) -> LogitsResult:
    """Runs `tokens` in prefill chunks of `chunk` rows, then `greedy` steps of one token.

    workers: worker processes per NUMA node with one thread each; 0 computes in this process.
    Raises LogitsError, EngineError, PlanError, SegmentError, SupervisorError.
    """
    rows = min(chunk or MAX_CHUNK, len(tokens))
    options = SessionOptions(
        max_rows=rows,
        max_seqs=1,
        max_logit_rows=rows,
        kv_blocks=-(-(len(tokens) + greedy) // KV_BLOCK),
        kv_format=KV_FORMATS[kv_format],
        trace_routes=1,
    )
    front_lane: Literal["on", "auto"] = "on" if workers == 0 else "auto"
    config = TeamConfig(workers_per_node=workers, threads_per_worker=1, front_lane=front_lane, session=options)
    with_router = routed_layers(path)
    with Team.open(path, config) as team:
        check_prompt(team, tokens, greedy)
        return _run(team, tokens=list(tokens), greedy=greedy, rows=rows, layers=with_router)


def routed_layers(path: Path) -> list[int]:
    """Indices of the layers that have a router, from the container's tensor table."""
    from ops.container import Container

    with Container.open(path) as container:
        names = [name.split(".") for name in container.tensors]
    return sorted(int(parts[1]) for parts in names if len(parts) == 3 and parts[0] == "layers" and parts[2] == "router")


def check_prompt(team: Team, tokens: Sequence[int], greedy: int) -> None:
    """Raises LogitsError if a token is outside the vocabulary or the text outgrows the context."""
    info = team.model.info
    for position, token in enumerate(tokens):
        if not 0 <= token < info.vocab:
            raise LogitsError(f"token {token} at position {position} is outside the vocabulary 0..{info.vocab - 1}")
    if len(tokens) + greedy > info.max_context:
        raise LogitsError(f"{len(tokens)} tokens + {greedy} greedy exceed the model's context of {info.max_context}")


def _run(team: Team, *, tokens: list[int], greedy: int, rows: int, layers: list[int]) -> LogitsResult:
    import numpy as np

    session, top_k = team.session, team.model.info.top_k
    logits, experts, weights = [], [], []
    token = -1
    for start, part in _chunks(tokens, rows):
        token = _step(team, part, start)
        logits.append(session.logits())
        if layers:
            chunk_experts, chunk_weights = session.routes(len(part))
            experts.append(chunk_experts)
            weights.append(chunk_weights)
    produced = []
    for index in range(greedy):
        produced.append(token)
        if index + 1 < greedy:
            token = _step(team, [token], len(tokens) + index)
    shape = (0, len(tokens), top_k)
    return LogitsResult(
        logits=np.concatenate(logits),
        layers=np.array(layers, np.int32),
        experts=np.concatenate(experts, axis=1) if layers else np.zeros(shape, np.int32),
        weights=np.concatenate(weights, axis=1) if layers else np.zeros(shape, np.float32),
        greedy=np.array(produced, np.int32),
    )


def _chunks(tokens: list[int], rows: int) -> Iterator[tuple[int, list[int]]]:
    for start in range(0, len(tokens), rows):
        yield start, tokens[start : start + rows]


def _step(team: Team, tokens: list[int], start: int) -> int:
    """One step of the only sequence with logits for every row. Returns the greedy token after the last."""
    blocks = range(-(-(start + len(tokens)) // KV_BLOCK))
    (result,), _ = team.session.step([SeqWork(tokens=tokens, start=start, blocks=blocks, n_logits=len(tokens))])
    if not result.ok:
        raise LogitsError(result.error)
    return result.rows[-1].token
