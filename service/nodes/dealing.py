"""Gives nodes that take any share their own, off the engine's way: additions first, so that every expert has a holder throughout."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from service.nodes.lifecycle import State
from service.nodes.link import Refused, Unreachable
from service.nodes.member import Member
from service.nodes.shares import Dealer, deal

log = logging.getLogger("colibri.nodes")
_RETRY_S = 1.0
_AT_ONCE = 8  # nodes that read their shares at one time
Pairs = frozenset[tuple[int, int]]


class Dealing:
    """`look` is for the pool's thread; `target` and `assign` for who balances."""

    def __init__(self, experts_of: tuple[int, ...], *, replicas: int, redeal_s: float) -> None:
        self._experts_of = experts_of
        self._replicas = replicas
        self._dealer = Dealer(leave_s=redeal_s)
        self._lock = threading.Lock()
        self._busy = False
        self._not_before = 0.0
        self._closing = False
        self.target: dict[str, Pairs] = {}  # what each is to hold; replaced, never changed

    def close(self) -> None:
        """Begins nothing more. What nodes are reading they read to the end."""
        self._closing = True

    def next_look(self, now: float) -> float:
        """When to look again, if nothing happens before."""
        return now + min(0.25, self._dealer.join_s) if self._dealer.waiting(now) else now + _RETRY_S

    def look(self, members: Iterable[Member], now: float) -> None:
        """Deals anew if it is time to, and sees to it that every node has its share."""
        takers = {m.name: m for m in members if m.description.assignable and m.life.state in (State.READY, State.DRAINING)}
        leaving = {name for name, member in takers.items() if member.life.state is State.DRAINING}
        names = self._dealer.look(takers.keys(), leaving, now)
        if names is not None:
            self.target = deal(names, self._experts_of, replicas=self._replicas)
            log.info("experts are dealt out over %d nodes: %s", len(names), ", ".join(sorted(names)))
        dealt_in = {name: member for name, member in takers.items() if name in self.target and name not in leaving}
        wrong = {name: member for name, member in dealt_in.items() if member.held != self.target[name]}
        if wrong and not self._busy and not self._closing and now >= self._not_before:
            self._busy = True
            threading.Thread(target=self._assign_all, args=(wrong, dict(self.target)), name="nodes-shares", daemon=True).start()

    def _assign_all(self, members: Mapping[str, Member], target: Mapping[str, Pairs]) -> None:
        try:
            self.assign(members, target)
        finally:
            self._not_before = time.monotonic() + _RETRY_S
            self._busy = False

    def assign(self, members: Mapping[str, Member], target: Mapping[str, Pairs]) -> bool:
        """Gives these what they are to hold: first all that is new, then, if that worked, nothing else. Returns whether it did."""
        with self._lock, ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nodes-share") as threads:
            more = {name: member for name, member in members.items() if not target[name] <= member.held}
            added = list(threads.map(lambda name: give(members[name], members[name].held | target[name]), more))
            if not all(added):
                return False
            less = {name: member for name, member in members.items() if member.held != target[name]}
            return all(list(threads.map(lambda name: give(members[name], target[name]), less)))


def give(member: Member, pairs: Pairs) -> bool:
    """Makes a node hold these, which may take it as long as reading them does."""
    link = member.link
    if link is None:
        return False
    shares: dict[int, list[int]] = {}
    for layer, expert in sorted(pairs):
        shares.setdefault(layer, []).append(expert)
    try:
        member.describe(link.assign(shares))
    except (Unreachable, Refused) as failure:
        log.warning("node %s did not take its share: %s", member.name, failure)
        return False
    return True
