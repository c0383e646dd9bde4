"""What no node computes of what nodes are there for, in words, and when to say so. Pure; time is passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from service.nodes.holders import Table
from service.nodes.legs import show_layers

SETTLE_S = 1.5
"""Seconds that it must be the same before it is said: nodes come one after the other, and read their shares."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Layers that nodes are to run whole and none does; and (layer, expert) of other layers that none holds, ascending."""

    layers: frozenset[int] = frozenset()
    experts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, table: Table, experts_of: Sequence[int], *, whole: Collection[int], elsewhere: frozenset[int]) -> Lack:
        """whole: layers that nodes run, those that are lost too. elsewhere: layers that are nodes' by the settings."""
        lacking = table.uncovered(experts_of)
        layers = frozenset(layer for layer, _ in lacking if layer in whole) | (elsewhere - table.ranged)
        return cls(layers, tuple(pair for pair in lacking if pair[0] not in layers))

    def __bool__(self) -> bool:
        return bool(self.layers or self.experts)

    @property
    def first(self) -> str:
        """The first of it, which says enough to who is refused; "" if nothing lacks."""
        if self.layers:
            return f"no node runs layers {show_layers(self.layers)}"
        if not self.experts:
            return ""
        layer, expert = self.experts[0]
        return f"no node holds expert {expert} of layer {layer}" + (f" and {len(self.experts) - 1} more" if len(self.experts) > 1 else "")

    def words(self, experts_of: Sequence[int]) -> str:
        """All of it; "" if nothing lacks."""
        parts = [f"layers {show_layers(self.layers)} are run by no node"] if self.layers else []
        counts = Counter(layer for layer, _ in self.experts)
        routed = {layer: count for layer, count in enumerate(experts_of) if count and layer not in self.layers}
        if counts and counts.keys() == routed.keys() and len(set(counts.values())) == len(set(routed.values())) == 1:
            layer = next(iter(counts))
            parts.append(f"{counts[layer]} of {routed[layer]} experts a layer are held by no node")
        elif counts:
            parts.append(f"{len(self.experts)} of {sum(routed.values())} experts are held by no node")
        return " and ".join(parts)


@dataclass(slots=True)
class Watch:
    """Over what lacks, as words."""

    said: str = ""
    _seen: str = ""
    _since: float = float("-inf")

    def look(self, words: str, now: float) -> bool:
        """Whether this is to be said now: it is not what was said last, and has been the same for a while."""
        if words != self._seen:
            self._seen, self._since = words, now
        if words == self.said or now - self._since < SETTLE_S:
            return False
        self.said = words
        return True
