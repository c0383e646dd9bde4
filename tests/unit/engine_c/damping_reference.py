"""What damping.h says, word by word and slowly: the policies over one layer's scores, in float32 with every operation rounded alone.

Independent of the engine's code: no table of best moves is kept, each is looked for anew among all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from engine_c import Damping

F = np.float32
Floats = npt.NDArray[np.float32]
ANY_LOSS = F(16)
LEAST_GAIN = F(1e-5)


def fma(a: float | np.float32, b: float | np.float32, c: float | np.float32) -> np.float32:
    return F(float(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))))


def exp(x: float | np.float32) -> np.float32:
    """colibri_expf, step by step (kernels/expf.h)."""
    x = F(min(max(float(x), -104.0), 89.0))
    n = fma(x, float.fromhex("0x1.715476p+0"), float.fromhex("0x1.8p23")) - F(float.fromhex("0x1.8p23"))
    r = fma(n, float.fromhex("-0x1.62e4p-1"), x)
    r = fma(n, float.fromhex("-0x1.7f7d1cp-20"), r)
    p = F(float.fromhex("0x1.6a23ccp-10"))
    for c in ("0x1.123a20p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2", "1.0", "1.0"):
        p = fma(p, r, float.fromhex(c))
    half = int(n) >> 1
    return F(F(p * F(2.0**half)) * F(2.0 ** (int(n) - half)))


class Row:
    """One token's scores, its own choice, and the choice it ends with."""

    def __init__(self, scores: Floats, k: int, logits: bool, margin: float) -> None:
        self.scores, self.k, self.margin = scores, k, F(margin)
        self.bad = not bool(np.isfinite(scores).all())
        order = list(range(k)) if self.bad else sorted(range(len(scores)), key=lambda e: (-scores[e], e))
        self.own = order[:k]
        self.ids = list(self.own)
        self.values = np.zeros(len(scores), F) if self.bad else self._values(logits)

    def _values(self, logits: bool) -> Floats:
        if logits:
            w = [exp(s - self.scores[self.own[0]]) for s in self.scores]
        else:
            w = [max(F(s - self.scores.min()), F(0)) for s in self.scores]
        total = F(0)
        for e in self.own:
            total = F(total + w[e])
        inverse = F(F(1) / total) if total > 0 else F(0)
        scaled = [F(value * inverse) for value in w]
        return np.array([F(value * value) for value in scaled], F)

    @property
    def changed(self) -> bool:
        return self.ids != self.own

    def may(self, place: int, e: int) -> bool:
        if e == self.own[place]:
            return self.ids[place] != e
        return e not in self.own and e not in self.ids and bool(self.scores[self.own[place]] - self.scores[e] <= self.margin)

    def loss(self, place: int, e: int) -> np.float32:
        return F(self.values[self.ids[place]] - self.values[e])

    def result(self) -> list[int]:
        return sorted(self.ids, key=lambda e: (-self.scores[e], e))


def within(damping: Damping, pairs: int, changed: int) -> bool:
    return changed + 1 <= float(F(damping.max_rerouted)) * pairs


# ---------------------------------------------------------------- scope sequence


class Along:
    """A sequence's state in one layer."""

    def __init__(self, damping: Damping, experts: int) -> None:
        self.damping = damping
        self.heat = np.zeros(experts, F)
        self.pairs = self.rerouted = 0

    def take(self, row: Row) -> None:
        if row.bad:
            return
        self.pairs += 1
        if within(self.damping, self.pairs, self.rerouted):
            self._exchange(row, self._prices(row.k))
            self.rerouted += row.changed
        decay, in_a_row = F(self.damping.decay), self.damping.kind == "heat"
        for e in range(len(self.heat)):
            used = e in row.ids
            self.heat[e] = F((self.heat[e] if used and in_a_row else F(self.heat[e] * decay)) + F(used))

    def _prices(self, k: int) -> list[np.float32]:
        d = self.damping
        if d.kind == "heat":
            rate = F(math.log(float(F(d.growth))) * (1 - float(F(d.decay))))
            return [min(F(exp(rate * max(F(h - F(d.threshold)), F(0))) - F(1)), ANY_LOSS) for h in self.heat]
        total = F(k)
        for h in self.heat:
            total = F(total + h)
        bound = F(F(d.capacity_factor) * F(total / F(len(self.heat))))
        return [ANY_LOSS if F(h + F(1)) > bound else F(0) for h in self.heat]

    def _exchange(self, row: Row, price: list[np.float32]) -> None:
        for _ in range(row.k):
            most, found = F(0), None
            for place, a in enumerate(row.ids):
                if a != row.own[place]:
                    continue
                for e in range(len(price)):
                    gain = F(F(price[a] - price[e]) - row.loss(place, e))
                    if gain > most and row.may(place, e):
                        most, found = gain, (place, e)
            if found is None:
                return
            row.ids[found[0]] = found[1]


# ---------------------------------------------------------------- scope batch


class Step:
    """The tokens of one step. pinned ones are not damped but count."""

    def __init__(self, damping: Damping, rows: Sequence[Row], pinned: Sequence[bool], experts: int) -> None:
        self.damping, self.rows, self.experts = damping, rows, experts
        self.members = [row for row, held in zip(rows, pinned, strict=True) if not held and not row.bad]
        self.queue = [0] * experts
        for row in rows:
            for e in row.ids:
                self.queue[e] += 1

    @property
    def rerouted(self) -> int:
        return sum(row.changed for row in self.members)

    def run(self) -> None:
        if self.damping.kind == "reuse":
            self._reuse()
        else:
            self._settle(self._cost())

    def _cost(self) -> list[np.float32]:
        k, n = self.rows[0].k, len(self.rows)
        if self.damping.kind == "capacity":
            share = n * k / self.experts
            bound = max(math.ceil(share), math.floor(float(F(self.damping.capacity_factor)) * share))
            return [ANY_LOSS if length > bound else F(0) for length in range(n + 2)]
        rate, even = F(math.log(float(F(self.damping.growth)))), F(F(F(n) * F(k)) / F(self.experts))
        relative = [F(F(length) / even) for length in range(n + 2)]
        return [min(F(exp(rate * F(x - F(1))) - F(1)), F(ANY_LOSS + F(x / F(64)))) for x in relative]

    def _settle(self, cost: list[np.float32]) -> None:
        while within(self.damping, len(self.members), self.rerouted) or self.rerouted == len(self.members):
            # of each pair of experts the move that loses least, the earliest of equals; of each expert the cheapest, the lowest of equals
            best: dict[tuple[int, int], tuple[np.float32, Row, int]] = {}
            for row in self.members:
                for place, a in enumerate(row.ids):
                    for e in range(self.experts):
                        if row.may(place, e) and ((a, e) not in best or row.loss(place, e) < best[a, e][0]):
                            best[a, e] = row.loss(place, e), row, place
            most, found = LEAST_GAIN, None
            for a in range(self.experts):
                prices = [(F(cost[self.queue[e] + 1] + best[a, e][0]), e) for e in range(self.experts) if (a, e) in best]
                if prices and F(cost[self.queue[a]] - min(prices)[0]) > most:
                    most, found = F(cost[self.queue[a]] - min(prices)[0]), (a, min(prices)[1])
            if found is None:
                return
            _, row, place = best[found]
            row.ids[place] = found[1]
            self.queue[found[0]] -= 1
            self.queue[found[1]] += 1

    def _emptying(self, e: int) -> tuple[np.float32, list[tuple[Row, int, int]]] | None:
        """What emptying an expert loses, and the moves; None if it cannot be done."""
        moves, total = [], 0.0
        for row in self.members:
            for place, a in enumerate(row.ids):
                if a != e:
                    continue
                targets = [(row.loss(place, to), to) for to in range(self.experts) if self.queue[to] and to != e and row.may(place, to)]
                if not targets:
                    return None
                total += float(min(targets)[0])
                moves.append((row, place, min(targets)[1]))
        return (F(total), moves) if moves and len(moves) == self.queue[e] else None

    def _reuse(self) -> None:
        while True:
            ways = {e: way for e in range(self.experts) if (way := self._emptying(e)) is not None}
            if not ways:
                return
            e = min(ways, key=lambda e: (ways[e][0], e))
            more = sum(not row.changed for row, _, _ in ways[e][1])
            if more and not within(self.damping, len(self.members), self.rerouted + more - 1):
                return
            for row, place, to in ways[e][1]:
                row.ids[place] = to
                self.queue[to] += 1
                self.queue[e] -= 1


# ---------------------------------------------------------------- as colibri_damp_scores


def damp(
    damping: Damping, scores: Floats, *, k: int, steps: Sequence[int], logits: bool = True, pinned: Sequence[bool] | None = None
) -> tuple[list[list[int]], list[bool]]:
    """Experts of every token, and which tokens' are not their own choice."""
    rows = [Row(token, k, logits, damping.margin) for token in scores]
    held = [False] * len(rows) if pinned is None else list(pinned)
    if damping.scope == "sequence":
        state = Along(damping, scores.shape[1])
        for row in rows:
            state.take(row)
    else:
        first = 0
        for count in steps:
            Step(damping, rows[first : first + count], held[first : first + count], scores.shape[1]).run()
            first += count
    return [row.ids if row.bad else row.result() for row in rows], [row.changed for row in rows]
