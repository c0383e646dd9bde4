"""How experts are dealt out over nodes that take what they are assigned. Pure: front ends that see the same names deal alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

Pairs = frozenset[tuple[int, int]]
"""(layer, expert)."""


def deal(names: Collection[str], experts_of: Sequence[int], *, replicas: int = 1) -> dict[str, Pairs]:
    """(layer, expert) pairs by node: expert e of E goes to node e * n // E of the sorted names, and to the replicas - 1 that follow it.

    experts_of: how many experts each layer has.
    """
    ordered = sorted(set(names))
    held: dict[str, set[tuple[int, int]]] = {name: set() for name in ordered}
    count = len(ordered)
    for layer, experts in enumerate(experts_of):
        for expert in range(experts if count else 0):
            first = expert * count // experts
            for step in range(min(replicas, count)):
                held[ordered[(first + step) % count]].add((layer, expert))
    return {name: frozenset(pairs) for name, pairs in held.items()}


def most_held(count: int, experts_of: Sequence[int], *, replicas: int = 1, slack: float = 0.0) -> int:
    """How many experts one of `count` nodes may hold, over all layers: an even part and `slack` of one more, or what dealing gives it."""
    if not count:
        return 0
    even = sum(experts_of) * min(replicas, count) / count
    dealt = max(map(len, deal([str(number) for number in range(count)], experts_of, replicas=replicas).values()))
    return max(dealt, int(even * (1 + slack)))


def lacking(held: Mapping[str, Pairs], experts_of: Sequence[int]) -> Pairs:
    """What nobody holds."""
    everything = frozenset((layer, expert) for layer, experts in enumerate(experts_of) for expert in range(experts))
    return everything.difference(*held.values())


def suits(held: Mapping[str, Pairs], experts_of: Sequence[int], *, replicas: int, slack: float) -> bool:
    """Whether what nodes hold may stay as it is: every expert has its copies, every node has some, and none has more than most_held."""
    total, copies = sum(experts_of), min(replicas, len(held))
    counts: dict[tuple[int, int], int] = {}
    for pair in (pair for pairs in held.values() for pair in pairs):
        counts[pair] = counts.get(pair, 0) + 1
    known = {(layer, expert) for layer, expert in counts if layer < len(experts_of) and expert < experts_of[layer]}
    most = most_held(len(held), experts_of, replicas=replicas, slack=slack)
    even = total * copies >= len(held)  # there is something for each
    each = all(0 < len(pairs) <= most if even else len(pairs) <= most for pairs in held.values())
    return each and len(known) == total and all(counts[pair] >= copies for pair in known)


@dataclass(slots=True)
class Dealer:
    """When to deal anew. A node that joins is waited for until no other follows; one that vanished may be back soon, under its name.

    Times are of one clock, in seconds.
    """

    join_s: float = 1.0
    leave_s: float = 10.0
    dealt: frozenset[str] = frozenset()  # the names of the last deal
    _seen: dict[str, float] = field(default_factory=dict)  # when each was there last
    _joined: float = float("-inf")

    def waiting(self, now: float) -> bool:
        """Whether a deal is due soon, for some have joined."""
        return now - self._joined < 2 * self.join_s

    def look(self, present: Collection[str], leaving: Collection[str], now: float) -> frozenset[str] | None:
        """The names to deal over, if it is time to. present: nodes that take shares; leaving: those that have said they go."""
        there = frozenset(present) - frozenset(leaving)
        if there - self._seen.keys():
            self._joined = now
        self._seen |= dict.fromkeys(there, now)
        for name in [name for name, at in self._seen.items() if name in leaving or now - at > self.leave_s]:
            del self._seen[name]
        wanted = frozenset(self._seen)
        joining = bool(wanted - self.dealt)
        if not wanted or wanted == self.dealt or (joining and now - self._joined < self.join_s):
            return None
        self.dealt = wanted
        return wanted
