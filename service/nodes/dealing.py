"""Gives nodes that take any share their own, off the engine's way: additions first, so that every expert has a holder throughout.

Several front ends may ask the same nodes. They deal by the names of the nodes alone, so those that see the same deal alike. What nodes
hold is left as it is where it will do (shares.suits), so one that starts, or sees a node come or go after another has dealt, changes
nothing. A node whose share another front end has changed meanwhile keeps that. Only if some experts are then held by nobody that is seen
from here they are given out again, and added to what is held: front ends that see different nodes end with more copies, never in a quarrel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from service.nodes.lifecycle import State
from service.nodes.link import Refused, Unreachable
from service.nodes.member import Member
from service.nodes.shares import Dealer, Pairs, deal, lacking, suits
from service.printable import counted

log = logging.getLogger("colibri.nodes")
_RETRY_S = 1.0
_SETTLE_S = 2.5  # seconds that a node must hold what it was not assigned here before that is another front end's wish: looks may be old
_AT_ONCE = 8  # nodes that read their shares at one time


class Dealing:
    """`look` is for the pool's thread; `shift` for who balances, on any."""

    def __init__(self, experts_of: tuple[int, ...], *, replicas: int, redeal_s: float, slack: float) -> None:
        self.experts_of = experts_of
        self.replicas = replicas
        self.slack = slack
        self.target: dict[str, Pairs] = {}  # what each is to hold; replaced, never changed
        self.deals = 0  # times that shares were dealt, or found to do
        self.foreign = 0  # times that another front end was found to have changed a share
        self._dealer = Dealer(leave_s=redeal_s)
        self._turn = threading.Lock()  # held while nodes are assigned something
        self._lock = threading.Lock()  # of what follows, and of target and deals
        self._due: set[str] = set()  # names that may not hold their target yet
        self._instances: dict[str, str] = {}  # of nodes when they held it
        self._odd: dict[str, tuple[Pairs, float]] = {}  # what others hold instead, and since when
        self._not_before = 0.0
        self._closing = False

    def close(self) -> None:
        """Begins nothing more. What nodes are reading they read to the end."""
        self._closing = True

    @property
    def settled(self) -> bool:
        """Whether every node has been given its share."""
        return bool(self.target) and not self._due

    def next_look(self, now: float) -> float:
        """When to look again, if nothing happens before."""
        return now + min(0.25, self._dealer.join_s) if self._dealer.waiting(now) else now + _RETRY_S

    def look(self, members: Iterable[Member], now: float) -> None:
        """Deals anew if it is time to, and sees to it that every node has its share."""
        takers = {m.name: m for m in members if m.description.assignable and m.life.state in (State.READY, State.DRAINING)}
        leaving = {name for name, member in takers.items() if member.life.state is State.DRAINING}
        names = self._dealer.look(takers.keys(), leaving, now)
        if names is not None:
            self._deal(names, takers)
        there = {name: member for name, member in takers.items() if name in self.target and name not in leaving}
        if self._closing or not self._turn.acquire(blocking=False):
            return  # nodes are between what they held and what they will
        started = False
        try:
            with self._lock:
                self._notice(there, now)
                due = bool(self._due & there.keys())
            if due and now >= self._not_before:
                threading.Thread(target=self._give_due, args=(there, self.target, self.deals), name="nodes-shares", daemon=True).start()
                started = True
        finally:
            if not started:
                self._turn.release()

    def shift(self, members: Mapping[str, Member], target: Mapping[str, Pairs], deals: int) -> bool:
        """Makes nodes hold this instead, unless shares have been dealt anew since there were `deals`. If one does not take it, all go back
        to what they held. Returns whether they took it."""
        with self._turn:
            with self._lock:
                if self.deals != deals or self._closing:
                    return False
                before = self.target
                self.target = {**before, **target}
            taken = self._assign(members, self.target, deals)
            with self._lock:
                if not taken and self.deals == deals:
                    self.target = before
                    self._due |= {name for name, member in members.items() if member.held != before[name]}
            return taken

    # ------------------------------------------------------------ what is to be

    def _deal(self, names: frozenset[str], takers: Mapping[str, Member]) -> None:
        held = {name: takers[name].held if name in takers else self.target.get(name, frozenset()) for name in names}
        with self._lock:
            self.deals += 1
            self._odd = {}
            if suits(held, self.experts_of, replicas=self.replicas, slack=self.slack):
                self.target, self._due = held, set()
                self._instances = {name: takers[name].description.instance for name in names if name in takers}
                log.info("all experts are held by %s: shares stay as they are", counted(len(names), "node"))
                return
            self.target, self._due = deal(names, self.experts_of, replicas=self.replicas), set(names)
        log.info("experts are dealt out over %s: %s", counted(len(names), "node"), ", ".join(sorted(names)))

    def _notice(self, there: Mapping[str, Member], now: float) -> None:
        """What nodes hold that is not what they were given here: they started anew, or another front end has given them something else."""
        adopted = []
        for name in there.keys() - self._due:
            member = there[name]
            if member.description.instance != self._instances.get(name, ""):
                self._due.add(name)
            elif member.held == self.target[name]:
                self._odd.pop(name, None)
            elif self._odd.setdefault(name, (member.held, now))[0] != member.held:
                self._odd[name] = member.held, now
            elif now - self._odd[name][1] >= _SETTLE_S:
                del self._odd[name]
                self.target = {**self.target, name: member.held}
                adopted.append(name)
        if adopted:
            self.foreign += len(adopted)
            log.info("another front end has changed what %s hold", ", ".join(sorted(adopted)))
            self._mend()

    def _mend(self) -> None:
        """Gives out what nobody is to hold any more, beside what is held."""
        missing = lacking(self.target, self.experts_of)
        if not missing:
            return
        dealt = deal(self.target.keys(), self.experts_of)
        more = {name: missing & pairs for name, pairs in dealt.items() if missing & pairs}
        self.target = {**self.target, **{name: self.target[name] | pairs for name, pairs in more.items()}}
        self._due |= more.keys()
        left = counted(len(missing), "expert")
        log.warning("%s had no holder left: another front end sees other nodes than this one. What is missing is added", left)

    # ------------------------------------------------------------ what is done

    def _give_due(self, members: Mapping[str, Member], target: Mapping[str, Pairs], deals: int) -> None:
        """Has the turn, and gives it back."""
        try:
            self._assign(members, target, deals)
        finally:
            self._not_before = time.monotonic() + _RETRY_S
            self._turn.release()

    def _assign(self, members: Mapping[str, Member], target: Mapping[str, Pairs], deals: int) -> bool:
        """Gives these what they are to hold: first all that is new, then, if that worked, nothing else. What no other would hold stays
        where it is. Returns whether all hold their target."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nodes-share") as threads:
            more = {name: member.held | target[name] for name, member in members.items() if not target[name] <= member.held}
            added = list(threads.map(lambda name: give(members[name], more[name]), more))
            if not all(added) or self._closing or self.deals != deals:
                return False
            kept = frozenset[tuple[int, int]]().union(*(member.held & target[name] for name, member in members.items()))
            wanted = {name: target[name] | (member.held - kept) for name, member in members.items()}
            less = {name: wanted[name] for name, member in members.items() if member.held != wanted[name]}
            taken = dict(zip(less, threads.map(lambda name: give(members[name], less[name]), less), strict=True))
        with self._lock:
            if self.deals != deals:
                return False
            reached = {name for name, member in members.items() if taken.get(name, True) and member.held == target[name]}
            self._due -= reached
            self._instances |= {name: members[name].description.instance for name in reached}
        return reached == members.keys()


def give(member: Member, pairs: Pairs) -> bool:
    """Makes a node hold these, which may take it as long as reading them does. Nothing is asked of it any more that it is to give up."""
    link = member.link
    if link is None:
        return False
    shares: dict[int, list[int]] = {}
    for layer, expert in sorted(pairs):
        shares.setdefault(layer, []).append(expert)
    member.narrow(pairs)
    try:
        member.describe(link.assign(shares))
    except (Unreachable, Refused) as failure:
        log.warning("node %s did not take its share: %s", member.name, failure)
        return False
    return True
