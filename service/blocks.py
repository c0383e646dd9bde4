"""Paged KV memory: who holds which block, and which blocks still hold something worth reusing. Pure.

A block holds the keys and values of BLOCK consecutive positions. Full blocks are published under (what came before, tokens), so a later
request with the same beginning takes them over instead of computing them. "What came before" is a number given to each published
content once and never again, so a match is exact by induction: no hash is trusted.

Every block is in exactly one place: held (reference count above 0), cached (0, published, oldest use first) or free (0, unpublished).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BLOCK = 16
_ROOT = 0
_Key = tuple[int, tuple[int, ...]]


class OutOfBlocks(RuntimeError):
    """Blocks were taken without asking whether there are any: a bug of ours."""


class IntegrityError(AssertionError):
    """The books do not balance: a bug of ours."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks by whereabouts, and the prefix cache's record in tokens."""

    total: int
    held: int
    cached: int
    free: int
    queried_tokens: int
    hit_tokens: int


@dataclass(slots=True)
class Table:
    """A sequence's blocks, in order, and the content numbers of the leading full ones."""

    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Tokens the blocks can hold."""
        return len(self.blocks) * BLOCK


@dataclass(frozen=True, slots=True)
class _Published:
    key: _Key
    uid: int  # this content's number, named by the keys of what follows it


def blocks_for(tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // BLOCK)


class BlockPool:
    """All KV blocks of a session."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a KV pool needs at least one block, not {total}")
        self.total = total
        self._free = deque(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * total
        self._published: dict[int, _Published] = {}
        self._by_key: dict[_Key, int] = {}
        self._next_uid = _ROOT + 1
        self._queried = 0
        self._hit = 0

    @property
    def available(self) -> int:
        """Blocks that can be had: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def lookup(self, tokens: Sequence[int]) -> Table:
        """The longest run of published blocks that `tokens` begins with, leaving at least the last token to be computed. Takes nothing."""
        found = Table()
        parent = _ROOT
        for start in range(0, len(tokens) - BLOCK, BLOCK):
            block = self._by_key.get((parent, tuple(tokens[start : start + BLOCK])))
            if block is None:
                break
            parent = self._published[block].uid
            found.blocks.append(block)
            found.chain.append(parent)
        return found

    def can_take(self, count: int, *, shared: Table | None = None, spare: int = 0) -> bool:
        """Whether `take` with the same arguments would succeed and leave `spare` blocks available."""
        revived = 0 if shared is None else sum(1 for block in shared.blocks if self._references[block] == 0)
        return count + spare <= self.available - revived

    def take(self, count: int, *, shared: Table | None = None) -> Table:
        """A table of `shared` blocks (from lookup) with one more reference each, then `count` new ones. Raises OutOfBlocks."""
        if not self.can_take(count, shared=shared):
            raise OutOfBlocks(f"{count} KV blocks wanted, {self.available} available")
        table = Table() if shared is None else Table(list(shared.blocks), list(shared.chain))
        for block in table.blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        table.blocks += [self._take_one() for _ in range(count)]
        return table

    def can_grow(self) -> bool:
        """Whether `grow` would succeed."""
        return self.available > 0

    def grow(self, table: Table) -> None:
        """Adds a block to a table. Raises OutOfBlocks."""
        if not self.can_grow():
            raise OutOfBlocks("a KV block wanted, none available")
        table.blocks.append(self._take_one())

    def count_lookup(self, *, queried: int, hit: int) -> None:
        """Records a request's use of the prefix cache, in tokens."""
        self._queried += queried
        self._hit += hit

    def publish(self, table: Table, tokens: Sequence[int], *, computed: int) -> None:
        """Makes a table's full blocks findable. `tokens` are the sequence's, of which the first `computed` have keys and values."""
        for index in range(len(table.chain), computed // BLOCK):
            parent = table.chain[-1] if table.chain else _ROOT
            key = (parent, tuple(tokens[index * BLOCK : (index + 1) * BLOCK]))
            twin = self._by_key.get(key)
            if twin is None:
                twin = table.blocks[index]
                self._published[twin] = _Published(key, self._next_uid)
                self._by_key[key] = twin
                self._next_uid += 1
            table.chain.append(self._published[twin].uid)

    def release(self, table: Table) -> None:
        """Drops one reference of each block and empties the table. Its end becomes the first to be evicted."""
        for block in reversed(table.blocks):
            if self._references[block] < 1:
                raise IntegrityError(f"KV block {block} released more often than taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._shelve(block)
        table.blocks.clear()
        table.chain.clear()

    def forget(self) -> None:
        """Nothing that was published is found any more. IntegrityError while anybody holds a block."""
        if self.available < self.total:
            raise IntegrityError(f"{self.total - self.available} KV blocks are held while all contents are given up")
        self._free.extend(self._cached)
        self._cached.clear()
        self._published.clear()
        self._by_key.clear()

    def stats(self) -> PoolStats:
        """A snapshot."""
        free, cached = len(self._free), len(self._cached)
        return PoolStats(self.total, self.total - free - cached, cached, free, self._queried, self._hit)

    def check_integrity(self, tables: Iterable[Table]) -> None:
        """Raises IntegrityError unless the books agree with `tables`, those of everyone who holds any block."""
        held = Counter(block for table in tables for block in table.blocks)
        wrong = [block for block in range(self.total) if self._references[block] != held[block]]
        if wrong:
            raise IntegrityError(f"KV blocks {wrong[:5]} have other reference counts than holders")
        idle = sorted([*self._free, *self._cached])
        if idle != [block for block in range(self.total) if held[block] == 0]:
            raise IntegrityError("a KV block without a holder is not exactly once free or cached")
        if any(block in self._published for block in self._free) or any(block not in self._published for block in self._cached):
            raise IntegrityError("a free KV block is published or a cached one is not")
        if self._by_key != {entry.key: block for block, entry in self._published.items()}:
            raise IntegrityError("the prefix index and the published blocks differ")

    def _take_one(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._by_key[self._published.pop(block).key]
        self._references[block] = 1
        return block

    def _shelve(self, block: int) -> None:
        if block in self._published:
            self._cached[block] = None
        else:
            self._free.append(block)
