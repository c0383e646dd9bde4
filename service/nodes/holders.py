"""Who holds which experts, and who of them computes which in a layer. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Held = Collection[tuple[int, int]]
"""(layer, expert) pairs."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that computes. `key` is of its present stream: one that comes back has another."""

    key: int
    name: str
    held: frozenset[tuple[int, int]]
    ranges: tuple[tuple[int, int], ...] = ()  # of layers it runs whole: first, end
    leaving: bool = False  # asked only for what no other holds


@dataclass(frozen=True, slots=True)
class Table:
    """The nodes there are at one moment, by name. rows [layers][experts]: keys of those that hold the expert, in the order of names, each
    layer and expert beginning with another: ties go to the first. One that is leaving is there only if no other holds it."""

    layers: int
    experts: int
    holders: tuple[Holder, ...] = ()
    rows: tuple[tuple[tuple[int, ...], ...], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, holders: Iterable[Holder], *, layers: int, experts: int) -> Table:
        """What is held of layers or experts that the model does not have counts for nothing."""
        ordered = tuple(sorted(holders, key=lambda holder: (holder.name, holder.key)))
        cells: list[list[list[int]]] = [[[] for _ in range(experts)] for _ in range(layers)]
        for holder in sorted(ordered, key=lambda holder: holder.leaving):
            for layer, expert in holder.held:
                if 0 <= layer < layers and 0 <= expert < experts and not (holder.leaving and cells[layer][expert]):
                    cells[layer][expert].append(holder.key)
        rows = tuple(tuple(_turned(keys, layer + expert) for expert, keys in enumerate(row)) for layer, row in enumerate(cells))
        return cls(layers, experts, ordered, rows)

    @property
    def ranged(self) -> frozenset[int]:
        """Layers that some node runs whole."""
        return frozenset(layer for holder in self.holders for first, end in holder.ranges for layer in range(first, min(end, self.layers)))

    def uncovered(self, experts_of: Sequence[int]) -> list[tuple[int, int]]:
        """Experts that no node holds, but of layers that one runs whole. experts_of: how many each layer has; none, where it is dense."""
        ranged = self.ranged
        rest = [(layer, count) for layer, count in enumerate(experts_of) if layer not in ranged]
        return [(layer, expert) for layer, count in rest for expert in range(count) if not self.rows[layer][expert]]


def _turned(keys: Sequence[int], by: int) -> tuple[int, ...]:
    at = by % len(keys) if keys else 0
    return (*keys[at:], *keys[:at])


@dataclass(frozen=True, slots=True)
class Choice:
    """Experts by the key of who computes them, ascending; `left` has no holder."""

    experts: dict[int, list[int]]
    left: list[int]


def choose(row: Sequence[Sequence[int]], counts: Mapping[int, int], *, without: Collection[int] = ()) -> Choice:
    """Who computes which experts of a layer: each the holder with the fewest rows so far, ties to the first.

    row: holders of each expert. counts: rows of each expert that has any, ascending. without: keys not to be chosen. Experts with the
    fewest holders come first, then those with the most rows: they leave the least choice.
    """
    left: list[int] = []
    chosen: dict[int, list[int]] = {}
    free: list[tuple[int, int, int, Sequence[int]]] = []
    load: dict[int, int] = {}
    for expert, rows in counts.items():
        holders = row[expert] if not without else [key for key in row[expert] if key not in without]
        if len(holders) == 1:
            key = holders[0]
            chosen.setdefault(key, []).append(expert)
            load[key] = load.get(key, 0) + rows
        elif holders:
            free.append((len(holders), -rows, expert, holders))
        else:
            left.append(expert)
    if free:
        for _, rows, expert, holders in sorted(free):
            key = min(holders, key=lambda holder: load.get(holder, 0))
            chosen.setdefault(key, []).append(expert)
            load[key] = load.get(key, 0) - rows
        for experts in chosen.values():
            experts.sort()
    return Choice(chosen, left)
