"""Moves experts between nodes, and copies them, so that each node has as much to do: workers.balance's plan, carried out by assignments."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from service.nodes.dealing import Dealing
from service.nodes.lifecycle import State
from service.nodes.member import Member
from service.nodes.shares import Pairs, most_held
from service.printable import counted
from workers.automatic_config import MIN_GAIN, Loads
from workers.balance import BalancePlan, plan_balance
from workers.rebalancing import PAUSE_S, BalanceReport

log = logging.getLogger("colibri.nodes")
_MEMORY = 0.9
"""Of a node's memory, what experts may take."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A node that may be told what to hold. lanes: threads that compute; memory_bytes: of its machine or control group, 0 if unknown."""

    name: str
    held: Pairs
    lanes: int = 1
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodesPlan:
    """A plan whose node numbers are places in `names`."""

    names: tuple[str, ...]
    plan: BalancePlan

    def share(self, name: str, layer: int) -> Pairs:
        """What a node is to hold of a layer."""
        number = self.names.index(name)
        return frozenset((layer, expert) for expert, at in enumerate(self.plan.copies[layer]) if number in at)


@dataclass(frozen=True, slots=True)
class NodesReport:
    """What was planned over nodes, and what came of it."""

    names: tuple[str, ...]
    report: BalanceReport


def plan_nodes(
    load: Loads,
    nodes: Sequence[Standing],
    experts_of: Sequence[int],
    *,
    expert_bytes: int,
    fixed: Callable[[int, int], int] = lambda layer, expert: 0,
    least: int = 1,
    slack: float = 0.0,
    replicas: int | None = None,
    min_gain: float = MIN_GAIN,
    pause: Callable[[], None] = lambda: None,
) -> NodesPlan:
    """Plans what nodes should hold from what experts had to do. Pure.

    load: tokens of each expert [layers][experts]. experts_of: experts of each layer, 0 where it has none to place. fixed: how many others,
    who can't be told what to hold, compute an expert too. least: nodes that each expert must be on. slack: of an even share, what a node
    may hold beyond it. replicas: further copies a layer may have; None: what there is room for.
    """
    ordered = sorted(nodes, key=lambda node: node.name)
    least = max(1, min(least, len(ordered)))
    at = [[tuple(i for i, node in enumerate(ordered) if (layer, e) in node.held) for e in range(n)] for layer, n in enumerate(experts_of)]
    most = most_held(len(ordered), experts_of, replicas=least, slack=slack) * expert_bytes
    room = {i: min(most, int(_MEMORY * node.memory_bytes)) if node.memory_bytes else most for i, node in enumerate(ordered)}
    spare = sum(room.values()) // max(1, expert_bytes) - sum(experts_of) * least
    layers = sum(1 for count in experts_of if count)
    parts = [[len(own) / max(1, len(own) + fixed(layer, e)) for e, own in enumerate(row)] for layer, row in enumerate(at)]
    plan = plan_balance(
        [[tokens * part for tokens, part in zip(load[layer], row, strict=False)] for layer, row in enumerate(parts)],
        expert_bytes,
        range(len(ordered)),
        at,
        replicas=max(0, spare // max(1, layers)) if replicas is None else replicas,
        least=least,
        min_gain=min_gain,
        speeds={i: float(max(1, node.lanes)) for i, node in enumerate(ordered)},
        capacity=room,
        pause=pause,
    )
    return NodesPlan(tuple(node.name for node in ordered), plan)


class NodeBalancer:
    """Balances the nodes of one model. From any thread; one balancing at a time."""

    def __init__(self, dealing: Dealing, members: Callable[[], list[Member]], *, expert_bytes: int, here: bool) -> None:
        """members: all there are. here: this process holds all experts too."""
        self._dealing = dealing
        self._members = members
        self._expert_bytes = expert_bytes
        self._here = here
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._foreign = 0  # changes by others when it was planned last
        self.moved = 0  # experts, copies made and copies given up, ever
        self.ratio = 1.0  # max/mean when it was planned last

    def close(self) -> None:
        """Makes what is under way end after the assignment that nodes are carrying out."""
        self._closing.set()

    @property
    def fixed(self) -> str:
        """Never: nodes that take what they are assigned may come at any time."""
        return ""

    @property
    def any(self) -> bool:
        """Whether there are nodes that may be told what to hold."""
        return any(member.description.assignable for member in self._members())

    def rebalance(self, load: Loads, *, dry_run: bool, replicas: int | None, min_gain: float, timeout: float) -> BalanceReport:
        """For the automatic mode (workers.automatic): as `balance`, but leaves things be for a while if another front end has moved experts
        meanwhile: two that move them to and fro do more harm than good."""
        foreign, self._foreign = self._foreign, self._dealing.foreign
        if foreign != self._foreign:
            log.warning("another front end moves experts too: this one waits. Set nodes_balance auto on one of them only")
            nothing = BalanceReport(_nothing(()).plan, dry_run)
            return replace(nothing, refused="another front end moves experts")
        return self.balance(load, dry_run=dry_run, replicas=replicas, min_gain=min_gain, timeout=timeout).report

    def balance(
        self, load: Loads, *, dry_run: bool, replicas: int | None = None, min_gain: float = MIN_GAIN, timeout: float
    ) -> NodesReport:
        """Plans and, unless it is a dry run, does it, in at most about timeout seconds. replicas: as plan_nodes has it. TimeoutError."""
        began = time.monotonic()
        if not self._turn.acquire(timeout=timeout):
            raise TimeoutError(f"experts are still being moved after {timeout:g} s: try again")
        try:
            deals, takers = self._dealing.deals, self._takers()
            found = self._plan(load, takers, replicas, min_gain)
            self.ratio = found.plan.before.ratio
            report = BalanceReport(found.plan, dry_run)
            if not dry_run and not found.plan.empty:
                report = self._carry_out(found, takers, deals, began + timeout)
            return NodesReport(found.names, replace(report, seconds=time.monotonic() - began))
        finally:
            self._turn.release()

    def _takers(self) -> dict[str, Member]:
        return {m.name: m for m in self._members() if m.description.assignable and m.life.state is State.READY}

    def _plan(self, load: Loads, takers: Mapping[str, Member], replicas: int | None, min_gain: float) -> NodesPlan:
        dealing = self._dealing
        if not self.any:
            return _nothing(tuple(takers), "nothing to move: no node takes what it is assigned; start nodes with --share auto")
        if not takers:
            return _nothing((), "nothing to move: no node that takes what it is assigned is there; colibri topology says how they are")
        if not dealing.settled or takers.keys() != dealing.target.keys():
            return _nothing(tuple(takers), "nodes come, go or read their shares just now: ask again when they have them")
        return plan_nodes(
            load,
            [Standing(name, dealing.target[name], m.description.lanes, m.description.memory_bytes) for name, m in takers.items()],
            dealing.experts_of,
            expert_bytes=self._expert_bytes,
            fixed=self._fixed,
            least=dealing.replicas,
            slack=dealing.slack,
            replicas=replicas,
            min_gain=min_gain,
            pause=lambda: time.sleep(PAUSE_S),
        )

    def _fixed(self, layer: int, expert: int) -> int:
        others = (m for m in self._members() if not m.description.assignable and m.life.state is State.READY)
        return self._here + sum((layer, expert) in m.held for m in others)

    def _carry_out(self, found: NodesPlan, takers: Mapping[str, Member], deals: int, deadline: float) -> BalanceReport:
        """Layer by layer."""
        plan, done, refused = found.plan, set[int](), ""
        changed = {move.layer for move in plan.moves} | {copy.layer for copy in (*plan.replicas, *plan.dropped)}
        for layer in sorted(changed):
            if self._closing.is_set() or time.monotonic() >= deadline:
                refused = "the model is being closed" if self._closing.is_set() else "time was up: what is left can be done by asking again"
                break
            target = self._dealing.target
            others = {name: frozenset(pair for pair in pairs if pair[0] != layer) for name, pairs in target.items()}
            wanted = {name: pairs | found.share(name, layer) for name, pairs in others.items() if name in found.names}
            if not self._dealing.shift(takers, wanted, deals):
                refused = "shares were dealt anew" if self._dealing.deals != deals else "a node did not take its share; the log says why"
                break
            done.add(layer)
        report = BalanceReport(
            plan,
            False,
            tuple(step for step in plan.moves if step.layer in done),
            tuple(step for step in plan.replicas if step.layer in done),
            tuple(step for step in plan.dropped if step.layer in done),
            refused,
        )
        self.moved += len(report.moved) + len(report.replicated) + len(report.dropped)
        log.info("experts have moved between nodes in %s: %s", counted(len(done), "layer"), refused or plan.reason)
        return report


def _nothing(names: tuple[str, ...], reason: str = "") -> NodesPlan:
    empty = plan_balance((), 0, range(max(1, len(names))), ())
    return NodesPlan(names, replace(empty, reason=reason))
