"""All nodes of a model: found by name, reached, told their shares; and the table of who holds what that the engine's thread goes by."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.nodes.addresses import Place, read_places, resolve
from service.nodes.coverage import Lack, Watch
from service.nodes.dealing import Dealing
from service.nodes.holders import Table
from service.nodes.legs import layers_of
from service.nodes.link import Answer, Identity, Link, Refused
from service.nodes.member import Member

log = logging.getLogger("colibri.nodes")
_ASK_EVERY = 1.0  # seconds between two looks at how a node is, which is also how a silent one is noticed when nothing is asked of it
_FAREWELL = 2.0  # seconds for threads to end

Event = tuple[Link, Answer | None]
"""An answer, or None: the stream has ended."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Where nodes are and how they are asked. experts_of: experts of each layer, 0 where it has no router, of `experts`
    at the most; of the layers `elsewhere`, which nodes run whole, none are dealt out. otherwise: what becomes of what no node computes, in
    words; "": it is as good here. Seconds where the name says so."""

    places: tuple[Place, ...]
    by_name: bool
    file: str  # that has them, in place of those; "": none
    identity: Identity
    dial: Callable[[str, int], Link]
    why_no_tls: Callable[[str], str]
    experts: int
    experts_of: tuple[int, ...]
    timeout_s: float
    resolve_s: float
    replicas: int
    redeal_s: float
    slack: float
    elsewhere: frozenset[int] = frozenset()
    otherwise: str = ""


class NodePool:
    """`table`, `link_of` and `inbox` are for the engine's thread; all else for any."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.members: dict[Place, Member] = {}  # replaced, never changed
        dealt = tuple(0 if layer in config.elsewhere else count for layer, count in enumerate(config.experts_of))
        self.dealing = Dealing(dealt, replicas=config.replicas, redeal_s=config.redeal_s, slack=config.slack)
        self.unresolved = ""  # why a name has no addresses, or a file cannot be read, in a sentence
        self._watch = Watch()
        self._links: dict[int, tuple[Member, Link]] = {}
        self._keys = itertools.count(1)
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self.table = self._make_table()

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begins to look for nodes."""
        self._thread.start()

    def close(self) -> None:
        """Ends all streams and threads."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_FAREWELL)
        members = list(self.members.values())
        for member in members:
            member.stop()
        for member in members:
            member.join(_FAREWELL)
        self.dealing.close()

    # ------------------------------------------------------------ the engine's thread

    def link_of(self, key: int) -> tuple[Member, Link] | None:
        """The stream of this key, and whose it is; None if it has ended."""
        return self._links.get(key)

    # ------------------------------------------------------------ what lacks; any thread

    def lack(self, table: Table) -> Lack:
        """What nobody computes that is in the table."""
        whole = layers_of(span for member in self.members.values() for span in member.ranges)
        return Lack.of(table, self.config.experts_of, whole=whole, elsewhere=self.config.elsewhere)

    @property
    def notes(self) -> list[str]:
        """What people should know, a sentence each: what lacks, once that has settled."""
        lacking = f"{self._watch.said}: {self.config.otherwise}" if self._watch.said else ""
        return [note for note in (self.unresolved, lacking) if note]

    # ------------------------------------------------------------ what members tell

    def admit(self, member: Member, link: Link) -> None:
        """Refused if it is one of the others under another address, or has the name of another."""
        with self._lock:
            for other, theirs in self._links.values():
                if other is member or other.name != member.name:
                    continue
                if other.description.instance == member.description.instance:
                    raise Refused(f"it is the node at {theirs.address}, under another address")
                raise Refused(f"the node at {theirs.address} is called {member.name} too: give each a --name of its own")
            self._links[link.key] = member, link

    def ask(self, member: Member) -> None:
        """Has it asked what it is, if it has yet to be."""
        member.ask(max(1.0, self.config.timeout_s))

    def changed(self) -> None:
        """The table is made anew, and shares are looked at."""
        with self._lock:
            self.table = self._make_table()
        self._wake.set()

    def told(self, link: Link, answer: Answer) -> None:
        """An answer goes to the engine's thread."""
        self.inbox.put((link, answer))

    def lost(self, link: Link) -> None:
        """The table is made anew before the engine's thread hears of it, so that it does not choose it again."""
        with self._lock:
            known = self._links.pop(link.key, None) is not None
            self.table = self._make_table()
        if known:
            self.inbox.put((link, None))
        self._wake.set()

    def forget(self, link: Link) -> None:
        """It is not to be chosen any more; its end is not news to the engine's thread, who says so."""
        with self._lock:
            self._links.pop(link.key, None)
            self.table = self._make_table()

    def _make_table(self) -> Table:
        holders = [holder for member in self.members.values() if (holder := member.holder) is not None and holder.key in self._links]
        return Table.of(holders, layers=len(self.config.experts_of), experts=self.config.experts)

    # ------------------------------------------------------------ its thread

    def _run(self) -> None:
        resolve_at = ask_at = 0.0
        while not self._closing:
            now = time.monotonic()
            try:
                if now >= resolve_at:
                    self.look_up()
                    resolve_at = now + self.config.resolve_s
                if now >= ask_at:
                    self._ask_all()
                    ask_at = now + min(_ASK_EVERY, self.config.resolve_s)
                self.dealing.look(self.members.values(), now)
                self._look_for_lacks(now)
            except Exception:
                log.exception("looking after nodes failed; it is tried again")
                resolve_at = ask_at = now + _ASK_EVERY
            due = min(resolve_at, ask_at, self.dealing.next_look(now))
            self._wake.wait(max(0.01, due - time.monotonic()))
            self._wake.clear()

    def look_up(self) -> None:
        """Looks where nodes are at this moment; those that are known stay as long as that cannot be told. Its thread's."""
        config = self.config
        found, trouble = read_places(config.file) if config.file else resolve(config.places, by_name=config.by_name)
        meanwhile = f"; until then the {len(self.members)} known are kept" if self.members and not found else ""
        if trouble and trouble != self.unresolved:
            log.warning("nodes: %s%s", trouble, meanwhile)
        elif self.unresolved and not trouble:
            log.info("nodes: found again: %d addresses", len(found))
        self.unresolved = trouble
        if not found and self.members:
            return  # the name service is away; a name that means nobody any more would be worse for us than for them
        gone = [member for place, member in self.members.items() if place not in found]
        new = [self._member(place) for place in found if place not in self.members]
        with self._lock:
            kept = {place: member for place, member in self.members.items() if place in found}
            self.members = kept | {member.place: member for member in new}
            self.table = self._make_table()
        for member in gone:
            log.info("node %s at %s is no longer among the addresses", member.name, member.place)
            member.stop()
        for member in new:
            member.start()

    def _look_for_lacks(self, now: float) -> None:
        config = self.config
        words = self.lack(self.table).words(config.experts_of) if config.otherwise else ""
        if not self._watch.look(words, now):
            return
        if words:
            log.warning("nodes: %s: %s", words, config.otherwise)
        else:
            log.info("nodes: all that nodes are to compute is held by them")

    def _member(self, place: Place) -> Member:
        config = self.config
        return Member(place, self, lambda address: config.dial(address, next(self._keys)), config.identity, config.why_no_tls)

    def _ask_all(self) -> None:
        for member in self.members.values():
            self.ask(member)
