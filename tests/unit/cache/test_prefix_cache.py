import random

import pytest

from pdserve.cache import block_hash
from pdserve.cache.block_hash import BlockHash, HashChain
from pdserve.cache.block_pool import BlockPool, NoFreeBlocks
from pdserve.cache.cached_granules import CachedGranules
from pdserve.cache.granule_hash import GRANULE_TOKENS
from pdserve.cache.prefix_cache import BlockTable, PrefixCache


def chain_of(*tokens: int, salt: bytes = b"") -> HashChain:
    return HashChain(tokens, 2, salt, "r")


class CollidingChain(HashChain):
    """Names the i-th block of every sequence alike."""

    def block_hash(self, index: int) -> BlockHash:
        return BlockHash(bytes([index]))


def compute(cache: PrefixCache, chain: HashChain) -> BlockTable:
    hit = cache.find(chain, chain.num_full_blocks)
    table = cache.open(hit, -(-len(chain) // 2))
    cache.enter(table, chain, len(chain))
    return table


def num_hits(cache: PrefixCache, chain: HashChain) -> int:
    return len(cache.find(chain, chain.num_full_blocks).block_ids)


def test_a_prefix_is_found_while_its_sequence_runs_and_after():
    cache = PrefixCache(BlockPool(8))
    table = compute(cache, chain_of(1, 2, 3, 4, 5))
    assert num_hits(cache, chain_of(1, 2, 3, 4, 9, 9)) == 2
    cache.close(table)
    assert num_hits(cache, chain_of(1, 2, 3, 4, 9, 9)) == 2
    assert (cache.pool.num_cached, cache.pool.num_free) == (2, 6)


def test_a_block_is_not_found_before_its_kv_is_valid():
    cache = PrefixCache(BlockPool(8))
    chain = chain_of(1, 2, 3, 4)
    table = cache.open(cache.find(chain, 2), 2)
    cache.enter(table, chain, 3)
    assert num_hits(cache, chain) == 1


def test_a_hit_ends_at_the_first_block_that_differs_and_at_the_limit():
    cache = PrefixCache(BlockPool(8))
    compute(cache, chain_of(1, 2, 3, 4, 5, 6))
    assert num_hits(cache, chain_of(1, 2, 9, 4, 5, 6)) == 1
    assert len(cache.find(chain_of(1, 2, 3, 4, 5, 6), 2).block_ids) == 2


def test_tenants_do_not_see_each_other():
    cache = PrefixCache(BlockPool(8))
    compute(cache, chain_of(1, 2, salt=b"a"))
    assert num_hits(cache, chain_of(1, 2, salt=b"b")) == 0


def test_E8_a_forced_collision_is_a_miss():
    cache = PrefixCache(BlockPool(8))
    compute(cache, CollidingChain((1, 2, 3, 4), 2, b"", "r"))
    assert num_hits(cache, CollidingChain((5, 6, 3, 4), 2, b"", "r")) == 0


def test_E8_a_collision_before_equal_tokens_is_a_miss_for_them_too():
    cache = PrefixCache(BlockPool(8))
    victim = CollidingChain((1, 2, 3, 4), 2, b"", "r")
    compute(cache, victim)
    attacker = CollidingChain((5, 6), 2, b"", "r")
    compute(cache, attacker)
    cache.check()
    # Block 1 holds equal tokens and its hash collides, but it follows other tokens.
    assert num_hits(cache, CollidingChain((5, 6, 3, 4), 2, b"", "r")) == 1
    assert num_hits(cache, victim) == 0


def test_blocks_are_evicted_only_when_none_is_free():
    cache = PrefixCache(BlockPool(4))
    cache.close(compute(cache, chain_of(1, 2, 3, 4)))
    table = cache.open(cache.find(chain_of(9, 9, 9, 9), 2), 2)
    assert num_hits(cache, chain_of(1, 2, 3, 4)) == 2
    cache.grow(table, 3)
    assert num_hits(cache, chain_of(1, 2, 3, 4)) == 1
    cache.check()


def test_the_prefix_used_last_is_evicted_last():
    cache = PrefixCache(BlockPool(3))
    for tokens in ((1, 1), (2, 2), (3, 3)):
        cache.close(compute(cache, chain_of(*tokens)))
    cache.close(compute(cache, chain_of(1, 1)))
    cache.open(cache.find(chain_of(4, 4), 1), 1)
    assert [num_hits(cache, chain_of(i, i)) for i in (1, 2, 3)] == [1, 0, 1]


def test_a_hit_is_not_evicted_for_its_own_table():
    cache = PrefixCache(BlockPool(3))
    cache.close(compute(cache, chain_of(1, 2, 3, 4)))
    cache.close(compute(cache, chain_of(5, 6)))
    chain = chain_of(1, 2, 3, 4, 7, 8)
    hit = cache.find(chain, 3)
    table = cache.open(hit, 3)
    assert tuple(table.block_ids[:2]) == hit.block_ids
    assert len(set(table.block_ids)) == 3
    cache.check()


def test_a_table_that_has_no_room_takes_nothing_not_even_its_hit():
    cache = PrefixCache(BlockPool(3))
    cache.close(compute(cache, chain_of(1, 2)))
    hit = cache.find(chain_of(1, 2, 3, 4), 2)
    assert not cache.can_open(hit, 4)
    with pytest.raises(NoFreeBlocks):
        cache.open(hit, 4)
    assert (cache.pool.num_cached, cache.pool.num_free) == (1, 2)


def test_a_table_that_cannot_grow_stays_as_it_was():
    cache = PrefixCache(BlockPool(2))
    table = compute(cache, chain_of(1, 2))
    with pytest.raises(NoFreeBlocks):
        cache.grow(table, 3)
    assert len(table.block_ids) == 1


def test_two_sequences_that_compute_one_prefix_leave_one_cached_copy():
    cache = PrefixCache(BlockPool(4))
    chain = chain_of(1, 2)
    empty = cache.find(chain, 1)
    tables = [cache.open(empty, 1) for _ in range(2)]
    for table in tables:
        cache.enter(table, chain, 2)
        cache.check()
    for table in tables:
        cache.close(table)
    assert (cache.pool.num_cached, cache.pool.num_free) == (1, 3)


def test_a_disabled_cache_keeps_nothing():
    cache = PrefixCache(BlockPool(4), is_enabled=False)
    cache.close(compute(cache, chain_of(1, 2, 3, 4)))
    assert num_hits(cache, chain_of(1, 2, 3, 4)) == 0
    assert cache.pool.num_free == 4


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_one_ledger_and_never_serves_wrong_tokens(seed: int):
    rng = random.Random(seed)
    cache = PrefixCache(BlockPool(10))
    content: dict[int, tuple[int, ...]] = {}
    open_tables: list[BlockTable] = []
    for _ in range(200):
        if open_tables and rng.random() < 0.5:
            cache.close(open_tables.pop(rng.randrange(len(open_tables))))
            continue
        chain_class = rng.choice((HashChain, CollidingChain))
        chain = chain_class([rng.randrange(2) for _ in range(rng.randint(1, 9))], 2, b"", "r")
        hit = cache.find(chain, chain.num_full_blocks)
        for index, block in enumerate(hit.block_ids):
            assert content[block] == chain.tokens(0, 2 * (index + 1))
        if not cache.can_open(hit, -(-len(chain) // 2)):
            continue
        table = cache.open(hit, -(-len(chain) // 2))
        for index in range(len(hit.block_ids), chain.num_full_blocks):
            content[table.block_ids[index]] = chain.tokens(0, 2 * (index + 1))
        cache.enter(table, chain, len(chain))
        open_tables.append(table)
        cache.check()
    for table in open_tables:
        cache.close(table)
    assert cache.pool.num_free + cache.pool.num_cached == 10


def test_a_table_is_one_and_the_same_tuple_until_it_changes():
    cache = PrefixCache(BlockPool(8))
    table = compute(cache, chain_of(1, 2, 3))
    seen = [table.snapshot()]
    assert table.snapshot() is seen[0]
    cache.grow(table, 3)
    seen.append(table.snapshot())
    twin = cache.fork(table, 2)
    assert twin.snapshot() == seen[1][:2]
    cache.make_writable(table, 1)
    seen.append(table.snapshot())
    cache.close(table)
    seen.append(table.snapshot())
    assert [len(blocks) for blocks in seen] == [2, 3, 3, 0]
    assert seen[1][1] != seen[2][1]


def test_a_prompt_of_which_nothing_is_cached_is_hashed_no_further_than_its_first_block(
    monkeypatch: pytest.MonkeyPatch,
):
    made: list[bytes] = []
    make = block_hash._hash_content
    monkeypatch.setattr(
        block_hash, "_hash_content", lambda *fields: made.append(fields[1]) or make(*fields)
    )
    cache, chain = PrefixCache(BlockPool(8)), chain_of(*range(10))
    table = compute(cache, chain_of(7, 8))
    made.clear()
    assert cache.find(chain, 5).block_ids == ()
    assert len(made) == 1
    cache.close(table)


def test_blocks_that_were_put_off_are_found_after_their_table_has_ended():
    cache = PrefixCache(BlockPool(8))
    first, second = chain_of(1, 2, 3, 4), chain_of(1, 2, 5, 6)
    tables = [cache.open(cache.find(chain, 2), 2) for chain in (first, second)]
    for table, chain in zip(tables, (first, second), strict=True):
        cache.enter(table, chain, 2)
        cache.enter(table, chain, 4)
    for table in tables:
        cache.close(table)
    assert (num_hits(cache, first), num_hits(cache, second)) == (2, 2)
    assert cache.pool.num_cached == 3, "the second's first block holds what another one does"
    cache.check()


def test_a_fork_has_entries_of_blocks_that_were_put_off():
    cache = PrefixCache(BlockPool(8))
    chain = chain_of(1, 2, 3, 4)
    table = cache.open(cache.find(chain, 2), 2)
    cache.enter(table, chain, 4)
    twin = cache.fork(table, 2)
    assert len(twin._entries) == 2
    cache.close(table)
    cache.close(twin)
    assert num_hits(cache, chain) == 2


def test_what_is_put_off_is_told_once_it_is_settled():
    cache, granules = PrefixCache(BlockPool(80)), CachedGranules()
    cache.tell(granules)
    chain = chain_of(*range(GRANULE_TOKENS))
    table = cache.open(cache.find(chain, 64), 64)
    cache.enter(table, chain, GRANULE_TOKENS)
    assert not granules.take_changes()
    cache.settle()
    assert [change.key for change in granules.take_changes()] == [chain.granule_key(0)]
