"""The KV block accounts: prefix reuse, eviction order, and books that always balance."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.blocks import BLOCK, BlockPool, IntegrityError, OutOfBlocks, Table, blocks_for


def sequence(*parts: int) -> list[int]:
    """Tokens of which each part fills a block."""
    return [part for part in parts for _ in range(BLOCK)]


def computed(pool: BlockPool, tokens: list[int]) -> Table:
    table = pool.take(blocks_for(len(tokens)))
    pool.publish(table, tokens, computed=len(tokens))
    return table


def test_a_released_prefix_is_found_again_and_costs_nothing() -> None:
    pool = BlockPool(4)
    first = computed(pool, sequence(1, 2, 3))
    blocks = list(first.blocks)
    pool.release(first)
    found = pool.lookup([*sequence(1, 2), 9])
    assert found.blocks == blocks[:2]
    shared = pool.take(1, shared=found)
    assert shared.blocks[:2] == blocks[:2]
    pool.check_integrity([shared])


def test_what_is_forgotten_is_not_found_again() -> None:
    pool = BlockPool(4)
    table = computed(pool, sequence(1, 2, 3))
    with pytest.raises(IntegrityError, match="3 KV blocks are held"):
        pool.forget()
    pool.release(table)
    pool.forget()
    assert pool.lookup([*sequence(1, 2), 9]).blocks == []
    assert pool.stats().free == 4
    pool.check_integrity([])
    again = computed(pool, sequence(1, 2))
    assert pool.lookup([*sequence(1, 2), 9]).blocks == again.blocks


def test_at_least_one_token_is_left_to_compute() -> None:
    pool = BlockPool(4)
    computed(pool, sequence(1, 2))
    assert len(pool.lookup(sequence(1, 2)).blocks) == 1
    assert len(pool.lookup([*sequence(1, 2), 0]).blocks) == 2


def test_a_block_is_reused_only_behind_the_same_beginning() -> None:
    pool = BlockPool(8)
    computed(pool, sequence(1, 2))
    assert pool.lookup([*sequence(3, 2), 0]).blocks == []
    assert len(pool.lookup([*sequence(1, 3), 0]).blocks) == 1


def test_only_full_blocks_are_published() -> None:
    pool = BlockPool(4)
    table = pool.take(2)
    tokens = sequence(1)[:-1]
    pool.publish(table, tokens, computed=len(tokens))
    assert pool.lookup([*sequence(1), 0]).blocks == []


def test_twins_computed_at_the_same_time_share_one_entry_and_their_continuations() -> None:
    pool = BlockPool(8)
    tokens = sequence(1, 2)
    first, second = pool.take(2), pool.take(2)
    pool.publish(first, tokens, computed=BLOCK)
    pool.publish(second, tokens, computed=2 * BLOCK)
    pool.publish(first, tokens, computed=2 * BLOCK)
    assert pool.lookup([*tokens, 0]).blocks == [first.blocks[0], second.blocks[1]]
    pool.release(first)
    pool.release(second)
    pool.check_integrity([])


def test_the_least_recently_used_end_is_evicted_first() -> None:
    pool = BlockPool(3)
    pool.release(computed(pool, sequence(1, 2)))
    pool.release(pool.take(2))  # one free block and the tail of the cached sequence
    assert len(pool.lookup([*sequence(1, 2), 0]).blocks) == 1


def test_taking_more_than_there_is_raises_and_changes_nothing() -> None:
    pool = BlockPool(2)
    held = pool.take(1)
    assert not pool.can_take(2)
    with pytest.raises(OutOfBlocks):
        pool.take(2)
    pool.check_integrity([held])


def test_a_cached_block_that_is_shared_cannot_also_be_evicted_for_the_same_request() -> None:
    pool = BlockPool(2)
    pool.release(computed(pool, sequence(1, 2)))
    found = pool.lookup([*sequence(1, 2), 0])
    assert len(found.blocks) == 2
    assert not pool.can_take(1, shared=found)


def test_a_holder_the_books_do_not_know_is_noticed() -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(IntegrityError):
        pool.check_integrity([])


class Pool(RuleBasedStateMachine):
    """Random holders; content is checked against what was written to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.holders: list[tuple[Table, list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(parts=st.lists(st.integers(0, 2), min_size=1, max_size=4), extra=st.integers(0, BLOCK - 1))
    def take(self, parts: list[int], extra: int) -> None:
        tokens = sequence(*parts) + [7] * (extra + 1)
        found = self.pool.lookup(tokens)
        for index, block in enumerate(found.blocks):
            assert self.content[block] == tuple(tokens[: (index + 1) * BLOCK])
        count = blocks_for(len(tokens)) - len(found.blocks)
        if not self.pool.can_take(count, shared=found):
            return
        table = self.pool.take(count, shared=found)
        for index in range(len(found.blocks), len(table.blocks)):
            self.content[table.blocks[index]] = tuple(tokens[: (index + 1) * BLOCK])
        self.pool.publish(table, tokens, computed=len(tokens))
        self.holders.append((table, tokens))

    @rule(which=st.integers(0, 10))
    def release(self, which: int) -> None:
        if self.holders:
            table, _ = self.holders.pop(which % len(self.holders))
            self.pool.release(table)

    @rule(which=st.integers(0, 10))
    def grow(self, which: int) -> None:
        if self.holders and self.pool.can_grow():
            table, tokens = self.holders[which % len(self.holders)]
            self.pool.grow(table)
            self.content[table.blocks[-1]] = (*tokens, -1)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity([table for table, _ in self.holders])
        stats = self.pool.stats()
        assert stats.held + stats.cached + stats.free == stats.total


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
