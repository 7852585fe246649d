import random

import pytest

from pdserve.cache.block_hash import HashChain
from pdserve.cache.block_pool import BlockPool
from pdserve.cache.cached_granules import CachedGranules
from pdserve.cache.granule_hash import GRANULE_TOKENS, GranuleChain, hash_granules
from pdserve.cache.prefix_cache import BlockTable, PrefixCache


def _cache(num_blocks: int) -> tuple[PrefixCache, CachedGranules]:
    cache, granules = PrefixCache(BlockPool(num_blocks)), CachedGranules()
    cache.tell(granules)
    return cache, granules


def _open(cache: PrefixCache, chain: HashChain) -> BlockTable:
    hit = cache.find(chain, chain.num_full_blocks)
    return cache.open(hit, -(-len(chain) // chain.block_size))


def _compute(cache: PrefixCache, chain: HashChain) -> BlockTable:
    table = _open(cache, chain)
    cache.enter(table, chain, len(chain))
    cache.settle()
    return table


def _chain(tokens: list[int], block_size: int = 32, salt: bytes = b"") -> HashChain:
    return HashChain(tokens, block_size, salt, "r")


def _words(*words: int) -> list[int]:
    """A quarter of a granule for each word."""
    return [word for word in words for _ in range(GRANULE_TOKENS // 4)]


def test_a_chain_makes_the_keys_of_its_tokens_however_it_grew():
    tokens = list(range(3 * GRANULE_TOKENS + 5))
    chain = _chain(tokens[:100], salt=b"t")
    chain.extend(tokens[100:300])
    twin = chain.fork()
    assert chain.granule_key(1) == hash_granules(tokens, b"t")[1]
    for token in tokens[300:]:
        twin.append(token)
    assert [twin.granule_key(i) for i in range(3)] == list(hash_granules(tokens, b"t"))


def test_a_fork_of_granules_grows_by_itself():
    chain = GranuleChain(b"t")
    chain.extend([1] * GRANULE_TOKENS)
    twin = chain.fork()
    twin.extend([2] * GRANULE_TOKENS)
    assert (len(chain.keys), len(twin.keys)) == (1, 2)


def test_a_granule_is_told_of_when_its_last_block_is_there():
    cache, granules = _cache(8)
    chain = _chain(_words(1, 2, 3, 4, 5))
    table = _open(cache, chain)
    cache.enter(table, chain, GRANULE_TOKENS - 1)
    cache.settle()
    assert list(granules.take_changes()) == []
    cache.enter(table, chain, GRANULE_TOKENS)
    cache.settle()
    cache.enter(table, chain, len(chain))
    cache.settle()
    key = chain.granule_key(0)
    assert list(granules.take_changes()) == [(key, False)]
    assert list(granules.take_changes()) == []


def test_a_granule_goes_with_any_of_its_blocks_and_comes_back_with_it():
    cache, granules = _cache(5)
    chain = _chain(_words(1, 2, 3, 4))
    cache.close(_compute(cache, chain))
    granules.take_changes()
    other = _open(cache, _chain(_words(7, 8)))
    key = chain.granule_key(0)
    assert list(granules.take_changes()) == [(key, True)]
    cache.close(other)
    cache.close(_compute(cache, chain))
    assert list(granules.take_changes()) == [(key, False)]


def test_what_extends_an_evicted_granule_goes_first():
    cache, granules = _cache(8)
    one, two = _chain(_words(1, 2, 3, 4)), _chain(_words(1, 2, 3, 4, 5, 6, 7, 8))
    cache.close(_compute(cache, two))
    granules.take_changes()
    _open(cache, _chain(_words(*range(10, 18))))
    assert list(granules.take_changes()) == [(two.granule_key(1), True), (one.granule_key(0), True)]
    assert len(granules) == 0


def test_a_child_whose_parent_came_back_anew_is_not_present():
    cache, granules = _cache(16)
    tokens = _words(1, 2, 3, 4, 5, 6, 7, 8)
    chain = _chain(tokens)
    # Both compute the same beginning; the second one's own copy of it is never entered.
    first, second = _open(cache, _chain(tokens[:128])), _open(cache, chain)
    cache.enter(first, chain, 128)
    cache.settle()
    cache.enter(second, chain, 128)
    cache.settle()
    cache.close(first)
    filler = _open(cache, _chain(_words(*range(10, 18))))
    assert granules.keys() == frozenset()
    cache.enter(second, chain, len(chain))
    cache.settle()
    assert granules.keys() == frozenset()
    cache.close(filler)
    _compute(cache, _chain(tokens[:128]))
    assert granules.keys() == {chain.granule_key(0)}
    assert len(cache.find(chain, 8).block_ids) == 4


def test_siblings_within_a_granule_share_blocks_and_go_together():
    cache, granules = _cache(9)
    one, two = _chain(_words(1, 2, 3, 4)), _chain(_words(1, 2, 3, 9))
    cache.close(_compute(cache, one))
    cache.close(_compute(cache, two))
    assert granules.keys() == {one.granule_key(0), two.granule_key(0)}
    _open(cache, _chain(_words(*range(20, 29))))
    assert granules.keys() == frozenset()
    assert granules._keys_of == {}


def test_E7_tenants_have_keys_of_their_own():
    cache, granules = _cache(8)
    for salt in (b"a", b"b"):
        _compute(cache, _chain(_words(1, 2, 3, 4), salt=salt))
    assert granules.keys() == {hash_granules(_words(1, 2, 3, 4), salt)[0] for salt in (b"a", b"b")}


@pytest.mark.parametrize("block_size", [16, 32, 96, 128])
@pytest.mark.parametrize("seed", range(4))
def test_present_granules_are_those_that_a_look_up_would_hit(block_size: int, seed: int):
    rng = random.Random(seed)
    cache, granules = _cache(max(2400 // block_size, 12))
    chains: list[HashChain] = []
    told: set[int] = set()
    open_tables: list[tuple[BlockTable, HashChain]] = []
    for _ in range(150):
        if open_tables and rng.random() < 0.5:
            table, chain = open_tables.pop(rng.randrange(len(open_tables)))
            if rng.random() < 0.7:
                cache.enter(table, chain, len(chain))
                cache.settle()
            cache.close(table)
        else:
            words = [rng.randrange(2) for _ in range(rng.randint(2, 20))]
            chain = _chain(_words(*words), block_size)
            hit = cache.find(chain, chain.num_full_blocks)
            if not cache.can_open(hit, -(-len(chain) // block_size)):
                continue
            table = _open(cache, chain)
            cache.enter(table, chain, rng.randrange(len(chain)))
            cache.settle()
            open_tables.append((table, chain))
            chains.append(chain)
        for key, is_removed in granules.take_changes():
            assert (key in told) == is_removed
            (told.discard if is_removed else told.add)(key)
        found = set()
        for chain in chains:
            num_tokens = len(cache.find(chain, chain.num_full_blocks).block_ids) * block_size
            found |= {chain.granule_key(i) for i in range(num_tokens // GRANULE_TOKENS)}
        assert granules.keys() == told
        assert told == found if GRANULE_TOKENS % block_size == 0 else told <= found
        cache.check()
