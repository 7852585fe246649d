import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.cache.block_pool import BlockPool, NoFreeBlocks
from pdserve.request import BlockId


def is_consecutive(blocks: tuple[BlockId, ...]) -> bool:
    return list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))


def test_a_table_gets_consecutive_blocks_while_a_run_is_long_enough():
    pool = BlockPool(32)
    tables = [pool.allocate(count) for count in (5, 3, 7)]
    assert all(is_consecutive(table) for table in tables)
    pool.free(tables[1])
    pool.check()
    assert is_consecutive(pool.allocate(9))


def test_a_growing_table_stays_consecutive_beside_others():
    pool = BlockPool(64)
    tables = [pool.allocate(4) for _ in range(3)]
    for _ in range(3):
        tables = [table + pool.allocate(1, table[-1]) for table in tables]
    assert all(is_consecutive(table) for table in tables)
    pool.check()


def test_freed_neighbours_join_to_one_run_again():
    pool = BlockPool(16)
    tables = [pool.allocate(1) for _ in range(16)]
    for table in tables[::2] + tables[1::2]:
        pool.free(table)
    assert is_consecutive(pool.allocate(16))


def test_scattered_blocks_are_still_all_usable():
    pool = BlockPool(9)
    tables = sorted(pool.allocate(1) for _ in range(9))
    for table in tables[::2]:
        pool.free(table)
    assert sorted(pool.allocate(5)) == [0, 2, 4, 6, 8]
    assert pool.num_free == 0


def test_too_large_an_allocation_takes_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(3)
    pool.check()
    assert (pool.num_free, pool.num_referenced) == (2, 2)


def test_a_forked_block_is_free_only_after_both_owners():
    pool = BlockPool(2)
    table = pool.allocate(1)
    fork = pool.fork(table)
    assert pool.is_shared(table[0])
    pool.free(table)
    assert (pool.num_free, pool.is_shared(table[0])) == (1, False)
    pool.free(fork)
    assert pool.num_free == 2


def test_a_block_cannot_be_freed_twice():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(KeyError):
        pool.free(table)


def test_a_kept_block_becomes_cached_and_can_be_taken_up_again():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.free((block,))
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 1, 2)
    pool.incref((block,))
    assert (pool.num_cached, pool.num_references(block)) == (0, 1)


def test_the_longest_unused_block_is_evicted_first_and_the_end_of_a_table_before_its_beginning():
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in old + new:
        pool.keep(block)
    pool.free(old)
    pool.free(new)
    assert pool.evict(3) == (old[1], old[0], new[1])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    assert pool.evict(5) == (new[0],)


def test_a_private_block_is_written_in_place():
    pool = BlockPool(3)
    table = list(pool.allocate(2))
    assert pool.make_writable(table, 1) is None


def test_a_shared_block_is_copied_before_it_is_written():
    pool = BlockPool(3)
    table = list(pool.allocate(2))
    fork = list(pool.fork(table))
    copy = pool.make_writable(fork, 1)
    assert copy == (table[1], fork[1])
    assert fork[1] != table[1]
    assert not pool.is_shared(table[1])
    pool.check()


def test_a_block_that_the_cache_knows_is_copied_before_it_is_written():
    pool = BlockPool(2)
    table = list(pool.allocate(1))
    pool.keep(table[0])
    copy = pool.make_writable(table, 0)
    assert copy is not None
    assert copy[1] == table[0]
    assert pool.num_cached == 1


def test_a_copy_without_a_free_block_leaves_the_table_as_it_was():
    pool = BlockPool(1)
    table = list(pool.allocate(1))
    fork = list(pool.fork(table))
    with pytest.raises(NoFreeBlocks):
        pool.make_writable(fork, 0)
    assert fork == table
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random owners take, share, keep, copy, free and evict; a plain count stands beside."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.tables: list[list[BlockId]] = []

    @rule(count=st.integers(0, 13), is_growing=st.booleans())
    def allocate(self, count: int, is_growing: bool) -> None:
        num_free = self.pool.num_free
        table = self.tables[-1] if is_growing and self.tables else []
        try:
            blocks = self.pool.allocate(count, table[-1] if table else None)
        except NoFreeBlocks:
            assert count > num_free
            assert self.pool.num_free == num_free
            return
        assert len(set(blocks)) == count
        held = {block for other in self.tables for block in other}
        assert not held & set(blocks), "a block was given to two owners"
        if table:
            table.extend(blocks)
        else:
            self.tables.append(list(blocks))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.tables.append(list(self.pool.fork(data.draw(st.sampled_from(self.tables)))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.free(self.tables.pop(index))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        self.pool.keep(data.draw(st.sampled_from([b for table in self.tables for b in table])))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        index = data.draw(st.integers(0, len(table) - 1))
        try:
            self.pool.make_writable(table, index)
        except NoFreeBlocks:
            return
        assert not self.pool.is_shared(table[index])
        assert not self.pool.is_kept(table[index])

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        held = {block for table in self.tables for block in table}
        assert not held & set(self.pool.evict(count))

    @invariant()
    def every_reference_has_its_owner(self) -> None:
        self.pool.check()
        held = [block for table in self.tables for block in table]
        assert all(self.pool.num_references(block) == held.count(block) for block in held)
        assert self.pool.num_referenced == len(set(held))
        assert self.pool.num_free + self.pool.num_cached + len(set(held)) == 12


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestNoBlockIsLostOrSharedByMistake = PoolMachine.TestCase
