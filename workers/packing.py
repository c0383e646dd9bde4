"""Packs one layer's experts, some of them copied, onto nodes: pure search, deterministic.

A node's level is its work over its speed. An expert with copies on several nodes gives each of its tasks to the node that has least to do,
so its load is poured over its nodes like water: that is what the engine does (engine_c/src/cut.c), and what levels() reckons with.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import mul, truediv

Copies = tuple[int, ...]
"""Indices of the nodes that hold an expert; the first is its home."""
Change = tuple[tuple[int, Copies], ...]
"""(expert, its new copies) pairs that are made together."""
Score = tuple[float, float]
"""The largest level, then the sum of squares: less is better."""

SWEEPS = 20
"""Rounds of pouring; one is exact with one replicated expert, and the tests compare many with the exact figure."""
FEW_SWEEPS = 4
"""Rounds while searching among experts that all have copies."""
DEPTH_FIRST_STEPS = 4000
"""Of the search from nothing, a layer: it is complete for small layers and stops at once when a large one is even."""
EVEN = 1.002
"""A packing this near to what is possible at all is not searched on."""
HEAVIEST = 4
"""So many of the fullest node's experts may take over another's copy: a copy is worth most to the heaviest."""
WIDEST, EMPTIEST = 6, 3
"""Where all experts have copies, so many of the fullest node's heaviest are tried on so many nodes: each try pours all of them anew."""
KICKS = 12
SMALL = 96
"""Experts times nodes up to which a packing is shaken KICKS times: larger ones have no bad local optima."""


def pour(base: Sequence[float], shared: Sequence[tuple[float, Copies]], speeds: Sequence[float], sweeps: int = SWEEPS) -> list[float]:
    """Levels of the nodes when every shared load has found its own; base: work that can't choose."""
    if not shared:
        return list(map(truediv, base, speeds))
    work = list(base)
    flows = [dict.fromkeys(nodes, load / len(nodes)) for load, nodes in shared]
    for flow in flows:
        for node, part in flow.items():
            work[node] += part
    total = sum(work)
    for _ in range(sweeps if len(flows) > 1 else len(flows)):
        moved = 0.0
        for (load, _), flow in zip(shared, flows, strict=True):
            moved += _settle(work, load, flow, speeds)
        if moved <= 1e-5 * total:
            break
    return list(map(truediv, work, speeds))


def _settle(work: list[float], load: float, flow: dict[int, float], speeds: Sequence[float]) -> float:
    """Pours one load anew over its nodes. Returns how much of it moved."""
    for node, part in flow.items():
        work[node] -= part
    order = sorted(flow, key=lambda node: work[node] / speeds[node])
    wet, speed, level = load, 0.0, 0.0
    for i, node in enumerate(order):
        wet, speed = wet + work[node], speed + speeds[node]
        level = wet / speed
        if i + 1 == len(order) or level <= work[order[i + 1]] / speeds[order[i + 1]]:
            break
    moved = 0.0
    for node, before in flow.items():
        flow[node] = max(0.0, level * speeds[node] - work[node])
        moved += abs(flow[node] - before)
        work[node] += flow[node]
    return moved


@dataclass(slots=True)
class Packing:
    """One layer's copies, which change. sizes: bytes of each expert; room: bytes that each node may take on beyond what it holds. least:
    copies that each expert keeps, if it has them."""

    loads: Sequence[float]
    speeds: Sequence[float]
    sizes: Sequence[int]
    room: list[float]
    copies: list[Copies]
    extra: int  # copies beyond the first that there may be in all
    least: int = 1
    replicated: dict[int, Copies] = field(default_factory=dict)  # experts with more than one copy
    _base: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicated = {expert: nodes for expert, nodes in enumerate(self.copies) if len(nodes) > 1}
        self._base = [0.0] * len(self.speeds)
        for expert, nodes in enumerate(self.copies):
            if len(nodes) == 1:
                self._base[nodes[0]] += self.loads[expert]

    @property
    def spare(self) -> int:
        """Copies that may be added."""
        return self.extra - sum(len(nodes) - 1 for nodes in self.replicated.values())

    def levels(self, change: Change = ()) -> list[float]:
        """Of the nodes, after a change."""
        base, shared = self._base.copy(), self.replicated
        if any(expert in shared or len(nodes) > 1 for expert, nodes in change):
            shared = {**shared, **dict(change)}
        for expert, nodes in change:
            for at, sign in ((self.copies[expert], -1.0), (nodes, 1.0)):
                if len(at) == 1:
                    base[at[0]] += sign * self.loads[expert]
        flowing = [(self.loads[expert], shared[expert]) for expert in sorted(shared) if len(shared[expert]) > 1]
        return pour(base, flowing, self.speeds, SWEEPS if self.least == 1 else FEW_SWEEPS)

    def score(self, change: Change = ()) -> Score:
        """Of the packing after a change."""
        levels = self.levels(change)
        return max(levels), sum(map(mul, map(mul, levels, levels), self.speeds))

    def fits(self, change: Change) -> bool:
        """Whether no node takes on more than it has room for."""
        more = [0] * len(self.speeds)
        for expert, nodes in change:
            for node in nodes:
                more[node] += self.sizes[expert]
            for node in self.copies[expert]:
                more[node] -= self.sizes[expert]
        return all(count <= 0 or count <= room for count, room in zip(more, self.room, strict=True))

    def apply(self, change: Change) -> None:
        """Makes a change."""
        for expert, nodes in change:
            for at, sign in ((self.copies[expert], -1), (nodes, 1)):
                for node in at:
                    self.room[node] -= sign * self.sizes[expert]
                if len(at) == 1:
                    self._base[at[0]] += sign * self.loads[expert]
            self.copies[expert] = nodes
            if len(nodes) > 1:
                self.replicated[expert] = nodes
            else:
                self.replicated.pop(expert, None)

    def copy(self) -> Packing:
        """Another that changes on its own."""
        return Packing(self.loads, self.speeds, self.sizes, list(self.room), list(self.copies), self.extra, self.least)


def floor(packing: Packing) -> float:
    """No packing has a lower largest level: all work spread evenly, or, without copies to give, the heaviest expert alone."""
    even = sum(packing.loads) / sum(packing.speeds)
    return even if packing.extra else max(even, max(packing.loads) / max(packing.speeds))


def improve(packing: Packing) -> list[tuple[float, Change]]:
    """Makes the best single change again and again while one helps. Returns them, each with the largest level after it."""
    done: list[tuple[float, Change]] = []
    now, least = packing.score(), floor(packing)
    for _ in range(4 * len(packing.loads) + 8):
        if now[0] <= least * EVEN:
            break
        best, found = now, None
        for change in _changes(packing):
            score = packing.score(change)
            if _better(score, best) and packing.fits(change):
                best, found = score, change
        if found is None:
            break
        packing.apply(found)
        now = best
        done.append((now[0], found))
    return done


def _better(score: Score, than: Score) -> bool:
    slack = 1e-9 * than[0]
    return score[0] < than[0] - slack or (score[0] <= than[0] + slack and score[1] < than[1] * (1 - 1e-6))


def _changes(packing: Packing) -> Iterator[Change]:
    """All that may lower the fullest node: an expert leaves it, changes places with a lighter one, or gets a copy elsewhere."""
    levels, copies, spare = packing.levels(), packing.copies, packing.spare
    top = max(range(len(levels)), key=levels.__getitem__)
    singles = _singles(packing)
    here = sorted((expert for expert, at in enumerate(copies) if top in at and packing.loads[expert] > 0), key=lambda e: -packing.loads[e])
    nodes: Sequence[int] = range(len(levels))
    if packing.least > 1:
        here, nodes = here[:WIDEST], sorted(nodes, key=levels.__getitem__)[:EMPTIEST]
    for rank, expert in enumerate(here):
        at = copies[expert]
        for node in nodes:
            if node in at:
                continue
            yield ((expert, tuple(node if old == top else old for old in at)),)
            if spare > 0 or rank < HEAVIEST:
                yield from _copying(packing, expert, node, spare)
            if len(at) == 1:
                yield from _swaps(packing, expert, node, levels, singles[node])


def _singles(packing: Packing) -> list[list[tuple[float, int]]]:
    """Each node's experts that have no other copy, by load."""
    singles: list[list[tuple[float, int]]] = [[] for _ in packing.speeds]
    for expert, at in enumerate(packing.copies):
        if len(at) == 1:
            singles[at[0]].append((packing.loads[expert], expert))
    return [sorted(own) for own in singles]


def _copying(packing: Packing, expert: int, node: int, spare: int) -> Iterator[Change]:
    """A further copy on a node; if none may be added, in place of another expert's."""
    wanted = (expert, (*packing.copies[expert], node))
    if spare > 0:
        yield (wanted,)
        return
    for other, nodes in packing.replicated.items():
        for old in nodes if len(nodes) > packing.least else ():
            if other != expert:
                yield wanted, (other, tuple(at for at in nodes if at != old))


def _swaps(packing: Packing, expert: int, node: int, levels: Sequence[float], others: Sequence[tuple[float, int]]) -> Iterator[Change]:
    """With the experts of a node whose load comes nearest to what levels the two."""
    (top,) = packing.copies[expert]
    a, b = packing.speeds[top], packing.speeds[node]
    ideal = packing.loads[expert] - (levels[top] - levels[node]) * a * b / (a + b)
    at = bisect_left(others, (ideal, -1))
    for load, other in others[max(0, at - 2) : at + 2]:
        if load < packing.loads[expert]:
            yield (expert, (node,)), (other, (top,))


# ---------------------------------------------------------------- from nothing


def pack(packing: Packing) -> None:
    """Replaces the copies by a packing from nothing: heaviest first, each where least is, and back-tracking while that may help."""
    loads, speeds = packing.loads, packing.speeds
    order = sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert))
    nodes = _depth_first([loads[expert] for expert in order], speeds, floor(packing) * EVEN)
    packing.apply(tuple((expert, (node,)) for expert, node in zip(order, nodes, strict=True)))


def _depth_first(loads: Sequence[float], speeds: Sequence[float], enough: float) -> list[int]:
    """Nodes of descending loads. The first way down is heaviest-first packing; others are tried up to a number of steps."""
    count, work = len(speeds), [0.0] * len(speeds)
    chosen: list[int] = []
    pending: list[list[int]] = []
    best, best_level, steps = [0] * len(loads), float("inf"), 0
    while True:
        depth = len(chosen)
        if depth == len(loads):
            level = max(w / v for w, v in zip(work, speeds, strict=True))
            if level < best_level:
                best, best_level = list(chosen), level
            choices: list[int] = []
        else:
            choices = _choices(work, speeds, loads[depth], best_level * (1 - 1e-9), count)
        pending.append(choices)
        steps += 1
        if best_level <= enough or (steps > DEPTH_FIRST_STEPS and best_level < float("inf")):
            return best
        while pending and not pending[-1]:
            pending.pop()
            if chosen:
                work[chosen[-1]] -= loads[len(chosen) - 1]
                chosen.pop()
        if not pending:
            return best
        node = pending[-1].pop()
        work[node] += loads[len(chosen)]
        chosen.append(node)


def _choices(work: Sequence[float], speeds: Sequence[float], load: float, below: float, count: int) -> list[int]:
    """Nodes worth trying, the best last: of equal ones one, and none that would be no better than what is known."""
    unlike = {(work[node], speeds[node]): node for node in reversed(range(count))}
    return sorted(
        (node for node in unlike.values() if (work[node] + load) / speeds[node] < below),
        key=lambda node: (-(work[node] + load) / speeds[node], -node),
    )


def spread_heaviest(packing: Packing) -> None:
    """Replaces the copies: the heaviest get the copies there may be, then all are packed, heaviest share first."""
    counts = [packing.least] * len(packing.loads)
    for _ in range(packing.extra - (packing.least - 1) * len(counts)):
        able = [expert for expert, count in enumerate(counts) if count < len(packing.speeds)]
        if able:
            counts[max(able, key=lambda expert: packing.loads[expert] / counts[expert])] += 1
    work = [0.0] * len(packing.speeds)
    for expert in sorted(range(len(counts)), key=lambda e: (-packing.loads[e] / counts[e], e)):
        share = packing.loads[expert] / counts[expert]
        nodes = sorted(range(len(work)), key=lambda node: ((work[node] + share) / packing.speeds[node], node))[: counts[expert]]
        for node in nodes:
            work[node] += share
        packing.apply(((expert, tuple(nodes)),))


def shake(packing: Packing) -> Packing:
    """The best of a few packings near this one, each disturbed and improved again."""
    dice, best = random.Random(len(packing.loads)), packing
    for _ in range(KICKS):
        if best.score()[0] <= floor(best) * EVEN:
            break
        other = best.copy()
        for expert in dice.sample(range(len(other.loads)), min(3, len(other.loads))):
            other.apply(((expert, (dice.randrange(len(other.speeds)),)),))
        improve(other)
        if _better(other.score(), best.score()) and min(other.room) >= min(0, *best.room):
            best = other
    return best


def relabel(packing: Packing, former: Sequence[Copies]) -> None:
    """Gives the nodes' shares to other nodes of the same speed, so that as many bytes as possible stay where they are."""
    count = len(packing.speeds)
    same = [[0] * count for _ in range(count)]
    for size, new, old in zip(packing.sizes, packing.copies, former, strict=True):
        for a in new:
            for b in old:
                same[a][b] += size
    pairs = sorted((-same[a][b], a != b, a, b) for a in range(count) for b in range(count) if packing.speeds[a] == packing.speeds[b])
    names: dict[int, int] = {}
    for _, _, a, b in pairs:
        if a not in names and b not in names.values():
            names[a] = b
    packing.apply(tuple((expert, tuple(names[node] for node in nodes)) for expert, nodes in enumerate(packing.copies)))
