"""Where experts should lie so that every node has as much to do: a pure plan from loads. No placement changes a result.

A layer is as slow as the node that has most to do in it, so each layer is packed on its own, and what counts over all of them is the sum of
their largest levels over the sum of their means: "max/mean", 1.0 when everything is even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from workers.automatic_config import MIN_GAIN
from workers.packing import EVEN, SMALL, Change, Copies, Packing, floor, improve, pack, relabel, shake, spread_heaviest

BYTES_PER_S = 1 << 30
"""What moving an expert is taken to cost: it goes on beside requests, held back on purpose (workers.moving)."""
HORIZON_S = 300.0
"""How long a load is trusted to stay as it is: what moving costs must come back within that."""

AS_GOOD = 1.005
"""A packing that moves less is preferred to one that is better by less than this."""

ONE_NODE = "one node: nothing to place"
ONE_NUMA_NODE = "one NUMA node: nothing to place"

Holdings = Sequence[Sequence[Sequence[int]]]
"""[layers][experts]: the nodes that hold the expert, its home first. None: it lies across nodes; such a layer stays as it is."""


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """An expert's home changes."""

    layer: int
    expert: int
    source: int
    target: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ExpertReplica:
    """A further copy of an expert, on a node that is not its home."""

    layer: int
    expert: int
    node: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Imbalance:
    """max/mean of the nodes' work: over all layers, and of each (1.0 where there is no load). A node's work counts by its speed."""

    ratio: float
    layers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BalancePlan:
    """What to do, in this order: end `dropped` copies, make `moves`, add `replicas`. Nothing if it would not pay.

    copies: who then holds what, as `current` was given. bytes: to be copied or moved. gain: the share of the experts' time that is
    predicted to be saved. reason: one sentence.
    """

    nodes: tuple[int, ...]
    moves: tuple[ExpertMove, ...]
    replicas: tuple[ExpertReplica, ...]
    dropped: tuple[ExpertReplica, ...]
    copies: tuple[tuple[tuple[int, ...], ...], ...]
    before: Imbalance
    after: Imbalance
    bytes: int
    gain: float
    reason: str

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.moves or self.replicas or self.dropped)


def plan_balance(
    load: Sequence[Sequence[float]],
    expert_bytes: int | Sequence[Sequence[int]],
    nodes: Sequence[int],
    current: Holdings,
    *,
    replicas: int = 0,
    least: int = 1,
    min_gain: float = MIN_GAIN,
    speeds: Mapping[int, float] | None = None,
    capacity: Mapping[int, int] | None = None,
    bytes_per_s: float = BYTES_PER_S,
    horizon_s: float = HORIZON_S,
    pause: Callable[[], None] = lambda: None,
) -> BalancePlan:
    """Plans where experts lie from what they had to do.

    load: tokens of each expert [layers][experts], in any unit. expert_bytes: of one expert, or of each. nodes: their numbers. replicas: how
    many further copies a layer may have in all; those it has beyond that are dropped. least: copies that every expert has to have; they
    count for no further ones, and who has fewer gets no more for that. speeds: of the nodes, for instance how many lanes
    they have (None: all alike). capacity: bytes of experts each node may hold (None, or a node left out: any). A change is planned if it
    saves min_gain of the experts' time and, within horizon_s, more time than moving takes at bytes_per_s, layer by layer as well. pause is
    called between layers.

    ValueError if the shapes do not fit together.
    """
    if not 1 <= least <= max(1, len(nodes)):
        raise ValueError(f"{least} copies of every expert can't be had on {len(nodes)} nodes")
    task = _Task.check(load, expert_bytes, nodes, current, speeds)
    if len(task.nodes) < 2:
        return task.nothing(ONE_NODE)
    if not any(map(sum, task.loads)):
        return task.nothing("no expert has had anything to do yet")
    before = task.imbalance(task.current)
    room = _room(task, capacity)
    order = sorted(filter(task.movable, range(len(task.loads))), key=lambda layer: (-task.excess(layer), layer))
    price = task.total(before) / (horizon_s * bytes_per_s)
    copies, held_back, forced = list(task.current), 0.0, False
    for layer in order:
        pause()
        trimmed = _trim(task.packing(layer, room, replicas, least))
        found = _best(trimmed, price)
        saved = (task.largest(layer, trimmed.copies) - task.largest(layer, found.copies)) / task.total(before)
        cost = bytes_to_move(task.sizes[layer], trimmed.copies, found.copies) / bytes_per_s
        if saved <= 0 or saved * horizon_s < cost:
            found, held_back = trimmed, held_back + max(0.0, saved)
        forced |= trimmed.copies != list(task.current[layer])
        copies[layer], room = tuple(found.copies), found.room
    plan = task.plan(before, tuple(copies))
    if forced or plan.gain >= min_gain or plan.empty:
        return replace(plan, reason=_describe(plan, held_back))
    return task.nothing(f"not worth it: it would save {plan.gain:.1%} of the experts' time, at least {min_gain:.1%} is wanted")


@dataclass(frozen=True, slots=True)
class _Task:
    """The arguments, checked; nodes by index but in `nodes`."""

    nodes: tuple[int, ...]
    loads: tuple[tuple[float, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    current: tuple[tuple[Copies, ...], ...]
    speeds: tuple[float, ...]

    @classmethod
    def check(
        cls,
        load: Sequence[Sequence[float]],
        expert_bytes: int | Sequence[Sequence[int]],
        nodes: Sequence[int],
        current: Holdings,
        speeds: Mapping[int, float] | None,
    ) -> _Task:
        """ValueError names what does not fit."""
        numbers = {node: index for index, node in enumerate(nodes)}
        if len(numbers) != len(nodes) or not nodes:
            raise ValueError(f"nodes {list(nodes)} must be different and at least one")
        if len(load) != len(current):
            raise ValueError(f"loads of {len(load)} layers were given for {len(current)}")
        rows, sizes, where = [], [], []
        for layer, holdings in enumerate(current):
            if len(load[layer]) < len(holdings):
                raise ValueError(f"layer {layer}: loads of {len(load[layer])} experts were given, it has {len(holdings)}")
            rows.append(tuple(float(load[layer][expert]) for expert in range(len(holdings))))
            if not all(0 <= value < float("inf") for value in rows[-1]):
                raise ValueError(f"layer {layer}: a load is negative or no number")
            own = [expert_bytes] * len(holdings) if isinstance(expert_bytes, int) else expert_bytes[layer]
            sizes.append(tuple(int(size) for size in own))
            if len(sizes[-1]) != len(holdings):
                raise ValueError(f"layer {layer}: sizes of {len(sizes[-1])} experts were given, it has {len(holdings)}")
            where.append(tuple(_indices(at, numbers, layer, expert) for expert, at in enumerate(holdings)))
        fast = tuple(float(speeds.get(node, 0)) if speeds else 1.0 for node in nodes)
        if not all(0 < speed < float("inf") for speed in fast):
            raise ValueError("every node needs a speed above zero: leave those without lanes out")
        return cls(tuple(nodes), tuple(rows), tuple(sizes), tuple(where), fast)

    def movable(self, layer: int) -> bool:
        """Whether its experts are whole."""
        return all(self.current[layer]) and sum(self.loads[layer]) > 0

    def packing(self, layer: int, room: list[float], replicas: int, least: int) -> Packing:
        """A layer as it is."""
        loads = self.loads[layer]
        extra = replicas + (least - 1) * len(loads)
        return Packing(loads, self.speeds, self.sizes[layer], list(room), list(self.current[layer]), extra, least)

    def largest(self, layer: int, copies: Sequence[Copies]) -> float:
        """The level of the node that has most to do, with these copies."""
        if not self.movable(layer):
            return self.mean(layer)
        return max(Packing(self.loads[layer], self.speeds, self.sizes[layer], [], list(copies), 0).levels())

    def mean(self, layer: int) -> float:
        """The level of every node if all were even."""
        return sum(self.loads[layer]) / sum(self.speeds)

    def excess(self, layer: int) -> float:
        """How much the fullest node has beyond the mean."""
        return self.largest(layer, self.current[layer]) - self.mean(layer)

    def total(self, imbalance: Imbalance) -> float:
        """The sum of all layers' largest levels."""
        return sum(ratio * self.mean(layer) for layer, ratio in enumerate(imbalance.layers)) or 1.0

    def imbalance(self, copies: Sequence[Sequence[Copies]]) -> Imbalance:
        """With these copies."""
        means = [self.mean(layer) for layer in range(len(self.loads))]
        largest = [self.largest(layer, own) for layer, own in enumerate(copies)]
        layers = tuple(most / mean if mean > 0 else 1.0 for most, mean in zip(largest, means, strict=True))
        return Imbalance(sum(largest) / sum(means) if any(means) else 1.0, layers)

    def plan(self, before: Imbalance, copies: tuple[tuple[Copies, ...], ...]) -> BalancePlan:
        """From the present copies to these."""
        moves: list[ExpertMove] = []
        added: list[ExpertReplica] = []
        dropped: list[ExpertReplica] = []
        final: list[tuple[tuple[int, ...], ...]] = []
        for layer, (olds, news) in enumerate(zip(self.current, copies, strict=True)):
            rows = []
            for expert, (old, new) in enumerate(zip(olds, news, strict=True)):
                size = self.sizes[layer][expert]
                home = _home(old, new)
                others = sorted(self.nodes[node] for node in set(new) - set(home))
                rows.append((*(self.nodes[node] for node in home), *others))
                dropped += [ExpertReplica(layer, expert, self.nodes[node], size) for node in old[1:] if node not in new or node in home]
                moves += [ExpertMove(layer, expert, self.nodes[old[0]], self.nodes[node], size) for node in home if node != old[0]]
                added += [ExpertReplica(layer, expert, self.nodes[node], size) for node in sorted(set(new) - {*old, *home})]
            final.append(tuple(rows))
        after = self.imbalance(copies)
        gain = 1 - self.total(after) / self.total(before)
        moved = sum(move.bytes for move in moves) + sum(copy.bytes for copy in added)
        return BalancePlan(self.nodes, tuple(moves), tuple(added), tuple(dropped), tuple(final), before, after, moved, max(0.0, gain), "")

    def nothing(self, reason: str) -> BalancePlan:
        """Everything stays."""
        before = self.imbalance(self.current)
        return replace(self.plan(before, self.current), gain=0.0, reason=reason)


def bytes_to_move(sizes: Sequence[int], old: Sequence[Copies], new: Sequence[Copies]) -> int:
    """Bytes of a layer's experts that get onto nodes where they were not."""
    return sum(size * len(set(b) - set(a)) for size, a, b in zip(sizes, old, new, strict=True))


def _indices(at: Sequence[int], numbers: Mapping[int, int], layer: int, expert: int) -> Copies:
    try:
        found = tuple(numbers[node] for node in at)
    except KeyError as error:
        raise ValueError(f"layer {layer}, expert {expert}: it lies on node {error}, which is none of {list(numbers)}") from error
    if len(set(found)) != len(found):
        raise ValueError(f"layer {layer}, expert {expert}: two copies on one node")
    return found


def _home(old: Copies, new: Copies) -> Copies:
    """Where the expert itself is to be: where it is, if that stays; else on a node that has no copy of it, if there is one."""
    if not new or old[0] in new:
        return old[:1]
    return (min(new, key=lambda node: (node in old, node)),)


def _room(task: _Task, capacity: Mapping[int, int] | None) -> list[float]:
    held = [0] * len(task.nodes)
    for sizes, holdings in zip(task.sizes, task.current, strict=True):
        for size, at in zip(sizes, holdings, strict=True):
            for node in at:
                held[node] += size
    limits = [float("inf") if capacity is None else capacity.get(node, float("inf")) for node in task.nodes]
    return [limit - count for limit, count in zip(limits, held, strict=True)]


def _trim(packing: Packing) -> Packing:
    """Drops copies beyond those allowed, such that it hurts least."""
    while packing.spare < 0:
        choices: list[Change] = [
            ((expert, tuple(at for at in packing.copies[expert] if at != node)),)
            for expert in packing.replicated
            for node in packing.copies[expert]
            if node != packing.copies[expert][0] and len(packing.copies[expert]) > packing.least
        ]
        packing.apply(min(choices, key=packing.score))
    return packing


def _best(start: Packing, price: float) -> Packing:
    """The better of improving what there is, which moves little, and of packing from nothing. price: of moving a byte, in units of load."""
    if sum(start.loads) <= 0:
        return start
    near = _near(start)
    if near.score()[0] <= floor(near) * EVEN:
        return near
    candidates = [near]
    beginnings = (pack, spread_heaviest) if start.extra else (pack,)
    for begin in beginnings if start.least == 1 else (spread_heaviest,):
        other = start.copy()
        begin(other)
        improve(other)
        candidates.append(other)
    if start.least == 1 and len(start.loads) * len(start.speeds) <= SMALL:
        candidates += [shaken for candidate in candidates if (shaken := shake(candidate)) is not candidate]
    for other in candidates[1:]:
        relabel(other, start.copies)
    limits = [min(0.0, room) for room in start.room]
    able = [other for other in candidates if all(room >= limit for room, limit in zip(other.room, limits, strict=True))]
    best = min(able, key=lambda other: other.score()[0] + price * bytes_to_move(start.sizes, start.copies, other.copies))
    return near if near.score()[0] <= best.score()[0] * AS_GOOD else best


def _near(start: Packing) -> Packing:
    """Improved step by step, without the last steps if they gained next to nothing."""
    near = start.copy()
    steps = improve(near)
    enough = near.score()[0] * AS_GOOD
    near = start.copy()
    for _, change in steps:
        if near.score()[0] <= enough:
            break
        near.apply(change)
    return near


def _describe(plan: BalancePlan, held_back: float) -> str:
    if plan.empty:
        why = "moving more would cost more than it saves" if held_back > 0 else "no other place does better"
        return f"the experts stay where they are: {why} (max/mean {plan.before.ratio:.2f})"
    parts = [(len(plan.moves), "move"), (len(plan.replicas), "replica"), (len(plan.dropped), "dropped replica")]
    what = " and ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in parts if count)
    return f"max/mean falls from {plan.before.ratio:.2f} to {plan.after.ratio:.2f} by {what}, {plan.bytes / 2**20:.0f} MiB"
