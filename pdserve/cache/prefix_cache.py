"""Which KV blocks hold which tokens, so that a prefix is computed once.

The cache and the pool are one ledger: free + cached + referenced = all blocks. A full block is
entered as soon as its KV is valid, stays findable while its sequence runs and after it, and is
evicted only when a block is needed and none is free, the longest unused first.

Entering 128 blocks takes 0.2 ms, and comes when a prompt has just been computed or has landed, so
when somebody waits for its next token. It is put off until a look-up could tell the difference, or
its table ends, or `settle` is called.

A hash only proposes a block. A hit needs equal tokens in it and the very same entry before it, so
that a forged collision is a miss, never another's KV.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NewType

from pdserve.cache.block_hash import BlockHash, HashChain
from pdserve.cache.block_pool import BlockPool, NoFreeBlocks
from pdserve.cache.cached_granules import CachedGranules
from pdserve.cache.granule_hash import GRANULE_TOKENS
from pdserve.request import BlockId

EntryId = NewType("EntryId", int)


@dataclass(slots=True)
class _Entry:
    """Nobody changes it. Not frozen: that takes longer to make."""

    entry_id: EntryId
    parent: EntryId | None
    block: BlockId
    content: Hashable
    """Of the block, see `HashChain.block_content`."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in order; it owns one reference on each until it is closed."""

    block_ids: list[BlockId] = field(default_factory=list)
    num_hit_blocks: int = 0
    """Leading blocks that came from the cache."""
    _entries: list[EntryId] = field(default_factory=list)
    """The cache entries that stand for the leading full blocks."""
    _snapshot: tuple[BlockId, ...] | None = None

    def snapshot(self) -> tuple[BlockId, ...]:
        """Returns the blocks as they are now: one and the same tuple until they change."""
        if self._snapshot is None:
            self._snapshot = tuple(self.block_ids)
        return self._snapshot

    def forget_snapshot(self) -> None:
        """Must be called by whoever changes `block_ids`."""
        self._snapshot = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixHit:
    """The longest cached prefix of a sequence; holds no reference, so use it at once."""

    block_ids: tuple[BlockId, ...]
    entries: tuple[EntryId, ...]
    num_unreferenced: int
    """How many of the blocks count as available until they are taken."""


class PrefixCache:
    """Finds, enters and evicts blocks of one pool; one thread only."""

    def __init__(self, pool: BlockPool, *, is_enabled: bool = True) -> None:
        """Owns the pool's cached blocks; a cache that is not enabled never has any."""
        self.pool = pool
        self._is_enabled = is_enabled
        self._by_hash: dict[BlockHash, _Entry] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._num_entries_made = 0
        self._granules: CachedGranules | None = None
        self._pending: list[tuple[BlockTable, HashChain, int]] = []
        """Tables whose leading full blocks are to be entered."""

    def tell(self, granules: CachedGranules) -> None:
        """Tells from now on what can be found and what no longer; nothing is cached yet."""
        assert not self._by_hash
        self._granules = granules

    def find(self, chain: HashChain, max_blocks: int) -> PrefixHit:
        """Finds the longest prefix of full blocks, at most `max_blocks` of them."""
        self.settle()
        blocks: list[BlockId] = []
        entries: list[EntryId] = []
        parent: EntryId | None = None
        for index in range(min(max_blocks, chain.num_full_blocks)):
            entry = self._by_hash.get(chain.block_hash(index))
            if entry is None or not _matches(entry, chain, index, parent):
                break
            parent = entry.entry_id
            blocks.append(entry.block)
            entries.append(parent)
        return PrefixHit(
            block_ids=tuple(blocks),
            entries=tuple(entries),
            num_unreferenced=self.pool.count_unreferenced(blocks),
        )

    def can_open(self, hit: PrefixHit, num_blocks: int) -> bool:
        """Says whether `open` would succeed."""
        num_new = num_blocks - len(hit.block_ids)
        return num_new <= self.pool.num_available - hit.num_unreferenced

    def open(self, hit: PrefixHit, num_blocks: int) -> BlockTable:
        """Makes a table of `num_blocks` that begins with the hit: all of it or nothing.

        Raises:
            NoFreeBlocks: not enough blocks are free or evictable; nothing was taken.
        """
        if not self.can_open(hit, num_blocks):
            raise NoFreeBlocks(f"no room for a table of {num_blocks} blocks")
        # The hit is referenced first, so that eviction cannot take it.
        self.pool.incref(hit.block_ids)
        table = BlockTable(list(hit.block_ids), len(hit.block_ids), list(hit.entries))
        self.grow(table, num_blocks)
        return table

    def grow(self, table: BlockTable, num_blocks: int) -> None:
        """Lengthens a table to `num_blocks`; evicts no more than is missing.

        Raises:
            NoFreeBlocks: not enough blocks are free or evictable; nothing was taken.
        """
        count = num_blocks - len(table.block_ids)
        if count <= 0:
            return
        if count > self.pool.num_available:
            raise NoFreeBlocks(f"{count} blocks asked for, {self.pool.num_available} available")
        self._evict(count - self.pool.num_free)
        table.forget_snapshot()
        after = table.block_ids[-1] if table.block_ids else None
        table.block_ids.extend(self.pool.allocate(count, after))

    def fork(self, table: BlockTable, num_blocks: int) -> BlockTable:
        """Returns a second table over the leading blocks, with references of its own."""
        self.settle()
        blocks = self.pool.fork(table.block_ids[:num_blocks])
        return BlockTable(list(blocks), table.num_hit_blocks, list(table._entries))

    def make_writable(self, table: BlockTable, index: int) -> tuple[BlockId, BlockId] | None:
        """Gives a table its own block at `index`, see `BlockPool.make_writable`.

        Raises:
            NoFreeBlocks: a copy is needed, and no block is free or evictable.
        """
        if self.pool.is_shared(table.block_ids[index]) and self.pool.num_free == 0:
            self._evict(1)
        table.forget_snapshot()
        return self.pool.make_writable(table.block_ids, index)

    def enter(self, table: BlockTable, chain: HashChain, num_valid_tokens: int) -> None:
        """Enters the table's full blocks among its first `num_valid_tokens`, whose KV is there.

        A block whose tokens the cache already holds stays the table's own.
        """
        num_full_blocks = num_valid_tokens // chain.block_size
        if self._is_enabled and len(table._entries) < num_full_blocks:
            self._pending.append((table, chain, num_full_blocks))

    def settle(self) -> None:
        """Carries out what was put off; from then on, changes of it are told."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for table, chain, num_full_blocks in pending:
            self._enter_blocks(table, chain, num_full_blocks)

    def close(self, table: BlockTable) -> None:
        """Drops the table's references; entered blocks become cached, the others free."""
        self.settle()
        self.pool.free(table.block_ids)
        table.forget_snapshot()
        table.block_ids.clear()
        table._entries.clear()

    def check(self) -> None:
        """Asserts that pool and entries agree."""
        self.settle()
        self.pool.check()
        assert len(self._by_hash) == len(self._hash_of)
        for digest, entry in self._by_hash.items():
            assert self._hash_of[entry.block] == digest
            assert self.pool.is_kept(entry.block)

    def _evict(self, count: int) -> None:
        evicted = self.pool.evict(count)
        for block in evicted:
            del self._by_hash[self._hash_of.pop(block)]
        if self._granules is not None:
            self._granules.evict(evicted)

    def _enter_blocks(self, table: BlockTable, chain: HashChain, num_full_blocks: int) -> None:
        first = len(table._entries)
        parent = table._entries[-1] if first else None
        for index in range(first, num_full_blocks):
            parent = self._enter(table.block_ids[index], chain, index, parent)
            table._entries.append(parent)
        if self._granules is not None and first < num_full_blocks:
            self._note_granules(self._granules, table, chain, first)

    def _note_granules(
        self, granules: CachedGranules, table: BlockTable, chain: HashChain, first: int
    ) -> None:
        """Tells of the granules that end in the table's blocks from `first` on."""
        size, first_granule = chain.block_size, first * chain.block_size // GRANULE_TOKENS
        parent = chain.granule_key(first_granule - 1) if first_granule else None
        if parent is not None and not granules.has(parent):
            return
        by_hash, entries = self._by_hash, table._entries
        has_told_parent = False
        for index in range(first_granule, len(entries) * size // GRANULE_TOKENS):
            key = chain.granule_key(index)
            if granules.has(key):
                parent, has_told_parent = key, False
                continue
            start = index * GRANULE_TOKENS // size
            stop = -(-(index + 1) * GRANULE_TOKENS // size)
            # The block before it, too: the parent may have come back as other entries.
            before = start - 1 if start and not has_told_parent else start
            blocks = []
            for each in range(before, stop):
                entry = by_hash.get(chain.block_hash(each))
                if entry is None or entry.entry_id != entries[each]:
                    return
                blocks.append(entry.block)
            granules.add(key, parent, tuple(blocks[start - before :]))
            parent, has_told_parent = key, True

    def _enter(
        self, block: BlockId, chain: HashChain, index: int, parent: EntryId | None
    ) -> EntryId:
        digest = chain.block_hash(index)
        known = self._by_hash.get(digest)
        if known is not None:
            if _matches(known, chain, index, parent):
                return known.entry_id
            # Another chain with this hash, or one whose beginning was evicted.
            self.pool.forget(known.block)
            del self._hash_of[known.block]
            if self._granules is not None:
                self._granules.evict((known.block,))
        entry_id = EntryId(self._num_entries_made)
        self._num_entries_made += 1
        self._by_hash[digest] = _Entry(entry_id, parent, block, chain.block_content(index))
        self._hash_of[block] = digest
        self.pool.keep(block)
        return entry_id


def _matches(entry: _Entry, chain: HashChain, index: int, parent: EntryId | None) -> bool:
    return entry.parent == parent and entry.content == chain.block_content(index)
