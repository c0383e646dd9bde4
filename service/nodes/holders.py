"""Who holds which expert, and who of them is asked: pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

NOBODY = ""
"""Stands for no node where an expert has none that can be asked."""


class Holders:
    """The nodes that hold each expert. Immutable: a change makes another."""

    def __init__(self, held: Mapping[str, Iterable[tuple[int, Collection[int]]]]) -> None:
        """held: by node's name, (layer, experts) pairs."""
        found: dict[tuple[int, int], list[str]] = {}
        for name in sorted(held):
            for layer, experts in held[name]:
                for expert in experts:
                    found.setdefault((layer, expert), []).append(name)
        self._of = {key: tuple(names) for key, names in found.items()}

    def of(self, layer: int, expert: int) -> tuple[str, ...]:
        """Names, ascending."""
        return self._of.get((layer, expert), ())


def choose(counts: Mapping[int, int], holders: Callable[[int], Sequence[str]]) -> dict[str, list[int]]:
    """Gives each expert with rows to one of its holders, such that all get about as many rows: those without a choice first, then the
    heaviest. counts: rows of each expert. Experts of nobody are under NOBODY. Experts are in ascending order."""
    rows: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    free: list[tuple[int, int, Sequence[str]]] = []
    for expert, count in counts.items():
        names = holders(expert)
        if len(names) > 1:
            free.append((-count, expert, names))
            continue
        name = names[0] if names else NOBODY
        found.setdefault(name, []).append(expert)
        rows[name] = rows.get(name, 0) + count
    for negative, expert, names in sorted(free):
        name = min(names, key=lambda one: (rows.get(one, 0), one))
        found.setdefault(name, []).append(expert)
        rows[name] = rows.get(name, 0) - negative
    return {name: sorted(experts) for name, experts in found.items()}


def deal(names: Collection[str], experts: int, *, replicas: int = 1) -> dict[str, tuple[int, ...]]:
    """Shares for nodes that take any: every layer's experts cut into as many even runs as there are nodes, in the order of their names, and
    each run given to `replicas` nodes in a row. A pure function of the names, so that several front ends agree without talking."""
    order = sorted(names)
    if not order:
        return {}
    shares: dict[str, list[int]] = {name: [] for name in order}
    for expert in range(experts):
        first = expert * len(order) // experts
        for k in range(min(replicas, len(order))):
            shares[order[(first + k) % len(order)]].append(expert)
    return {name: tuple(own) for name, own in shares.items()}
