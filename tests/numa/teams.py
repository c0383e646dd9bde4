"""Teams inside a machine: what they compute, and where their memory lies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from engine_c import KV_BLOCK, SeqWork, SessionOptions
from tests.numa.kernel import mappings, pages_of, share
from tests.numa.models import MODEL
from workers.mapping import PAGE
from workers.placement import Placement
from workers.segments import ModelImage
from workers.slot import SupervisorConfig
from workers.team import Team, TeamConfig

PROMPT = [(37 * i + 11) % 1000 for i in range(40)]
STEPS = 6
OPTIONS = SessionOptions(max_rows=64, max_seqs=2, max_logit_rows=64, kv_blocks=10)

Logits = npt.NDArray[np.float32]


@contextmanager
def team(placement: Placement = "auto", *, workers: int | None = 0, threads: int | None = 1) -> Iterator[Team]:
    """A team with so many workers of so many lanes on each node (None: planned)."""
    config = TeamConfig(
        load_mode="memfd",
        placement=placement,
        workers_per_node=workers,
        threads_per_worker=threads,
        session=OPTIONS,
        start_timeout_s=300.0,
        supervisor=SupervisorConfig(start_s=100.0),
    )
    with Team.open(MODEL, config) as opened:
        yield opened


def compute(team: Team) -> Logits:
    """Logits of every token of PROMPT and of STEPS greedy ones."""
    blocks = range(-(-(len(PROMPT) + STEPS) // KV_BLOCK))
    work, found = SeqWork(tokens=PROMPT, start=0, blocks=blocks, n_logits=len(PROMPT)), []
    for _ in range(1 + STEPS):
        (result,), _ = team.session.step([work])
        assert result.ok, result.error
        found.append(team.session.logits())
        work = SeqWork(tokens=[result.rows[-1].token], start=work.start + len(work.tokens), blocks=blocks, n_logits=1)
    return np.concatenate(found)


def greedy(team: Team, prompt: Sequence[int], *, tokens: int) -> tuple[int, ...]:
    """What follows a prompt."""
    blocks = range(-(-(len(prompt) + tokens) // KV_BLOCK))
    work, found = SeqWork(tokens=prompt, start=0, blocks=blocks, n_logits=1), list[int]()
    for _ in range(tokens):
        (result,), _ = team.session.step([work])
        assert result.ok, result.error
        found.append(result.rows[-1].token)
        work = SeqWork(tokens=found[-1:], start=work.start + len(work.tokens), blocks=blocks, n_logits=1)
    return tuple(found)


def local_share(team: Team) -> tuple[int, int]:
    """Of the tasks whose weights have a home, those done there; and all of these."""
    lanes = team.describe().lanes
    return sum(lane.local for lane in lanes), sum(lane.homed for lane in lanes)


def shares(image: ModelImage) -> dict[int, float]:
    """Of each node's part of the weights, the pages found on it."""
    found = {}
    for node in image.placement.nodes:
        parts = [part for part in image.parts_for(node) if part.node == node]
        pages = pages_of(parts[0].fd, [(part.offset, part.bytes) for part in parts])
        assert sum(pages.values()) == sum(-(-part.bytes // PAGE) for part in parts), f"node {node}"
        found[node] = share(pages, node)
    return found


def worker_shares(pid: int) -> dict[int, float]:
    """The same as a worker has it in its page tables: memory files are named after the node they belong on."""
    found: dict[int, Counter[int]] = {}
    for mapping in mappings(pid).values():
        match = re.match(r"file=/memfd:colibri.*:node(\d+)", mapping.what)
        if match:
            found.setdefault(int(match[1]), Counter()).update(mapping.pages)
    return {node: share(pages, node) for node, pages in found.items() if pages}


def kv_shares(team: Team) -> dict[int, tuple[int, float]]:
    """(node, share of the pages there) of each KV head's memory."""
    session, nodes = team.session, team.image.placement.nodes
    heads, found = team.model.info.kv_heads, {}
    for head in range(heads):
        home = nodes[head * len(nodes) // heads]
        found[head] = (home, share(pages_of(session.arena_fd, [session.kv_range(head)]), home))
    return found
