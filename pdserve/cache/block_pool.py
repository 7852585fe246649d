"""Who holds each KV block: free, cached or referenced; never two of them, never none.

    free        --allocate-->  referenced
    referenced  --free-->      free         the last reference of a block nobody marked as kept
    referenced  --free-->      cached       the last reference of a kept one: its content stays
    cached      --incref-->    referenced
    cached      --evict-->     free

A sequence holds one reference on each block of its table. A block may be referenced by many
sequences; it is written by none of them then. The pool knows ids only, no tokens and no memory.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pdserve.request import BlockId


class NoFreeBlocks(Exception):
    """The pool has fewer free blocks than asked for; nothing was taken."""


class FreeRuns:
    """The free ids as maximal runs of consecutive ones, so that a table can be one view.

    Attention on a CPU reads a run of consecutive blocks through a view and copies otherwise.
    """

    def __init__(self, num_blocks: int) -> None:
        """All ids from 0 are free."""
        self._length_of: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._num_free = 0
        if num_blocks:
            self._add_run(0, num_blocks)

    def __len__(self) -> int:
        """Counts free ids."""
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        """Walks over all free ids, in no promised order."""
        return (
            i for start, length in self._length_of.items() for i in range(start, start + length)
        )

    def add(self, blocks: Iterable[int]) -> None:
        """Puts ids back, all different, and joins them with their neighbours."""
        run_start = run_end = None
        for block in sorted(blocks):
            if block == run_end:
                run_end += 1
                continue
            if run_start is not None and run_end is not None:
                self._join_run(run_start, run_end - run_start)
            run_start, run_end = block, block + 1
        if run_start is not None and run_end is not None:
            self._join_run(run_start, run_end - run_start)

    def take_at(self, block: int, count: int) -> int:
        """Takes up to `count` ids from `block` on, if a run begins there; returns how many."""
        if block not in self._length_of:
            return 0
        length = self._remove_run(block)
        taken = min(count, length)
        if taken < length:
            self._add_run(block + taken, length - taken)
        return taken

    def take(self, count: int) -> list[int]:
        """Takes `count` ids (there must be as many) in as few runs as can be."""
        taken: list[int] = []
        while len(taken) < count:
            missing = count - len(taken)
            length, start = self._by_length[-1]
            if length > 2 * missing:
                # Begins in the middle of the longest run: the table that ends before it keeps
                # room to grow in place.
                first = start + length // 2
                self._remove_run(start)
                self._add_run(start, first - start)
                self._add_run(first + missing, start + length - first - missing)
                taken.extend(range(first, first + missing))
                continue
            if length >= missing:
                length, start = self._by_length[bisect_left(self._by_length, (missing, 0))]
            taken.extend(range(start, start + self.take_at(start, missing)))
        return taken

    def _join_run(self, start: int, length: int) -> None:
        end = start + length
        if start in self._start_by_end:
            start = self._start_by_end[start]
            length += self._remove_run(start)
        if end in self._length_of:
            length += self._remove_run(end)
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        self._length_of[start] = length
        self._start_by_end[start + length] = start
        insort(self._by_length, (length, start))
        self._num_free += length

    def _remove_run(self, start: int) -> int:
        length = self._length_of.pop(start)
        del self._start_by_end[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self._num_free -= length
        return length


class BlockPool:
    """Reference counts over a fixed number of blocks; one thread only."""

    def __init__(self, num_blocks: int) -> None:
        """All blocks are free."""
        self.num_blocks = num_blocks
        self._free = FreeRuns(num_blocks)
        self._references: dict[BlockId, int] = {}
        self._kept: set[BlockId] = set()
        # Kept blocks without a reference, the longest unused first.
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks whose content nobody knows."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Kept blocks without a reference; they can be evicted."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Blocks in the table of at least one sequence."""
        return len(self._references)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated, if need be after eviction."""
        return self.num_free + self.num_cached

    def num_references(self, block: BlockId) -> int:
        """Counts the references on a block."""
        return self._references.get(block, 0)

    def count_unreferenced(self, blocks: Sequence[BlockId]) -> int:
        """Counts those of the blocks that have no reference."""
        references = self._references
        return sum(block not in references for block in blocks)

    def is_kept(self, block: BlockId) -> bool:
        """Says whether the block becomes cached, or is so, when nobody refers to it."""
        return block in self._kept

    def is_shared(self, block: BlockId) -> bool:
        """Says whether more than one reference stands, so that nobody may write the block."""
        return self._references.get(block, 0) > 1

    def allocate(self, count: int, after: BlockId | None = None) -> tuple[BlockId, ...]:
        """Takes free blocks, one reference each; if it can, the ids that follow `after`.

        Raises:
            NoFreeBlocks: fewer are free. Cached blocks do not count: evict first.
        """
        if count > len(self._free):
            raise NoFreeBlocks(f"{count} blocks asked for, {len(self._free)} free")
        taken: list[int] = []
        if after is not None:
            first = after + 1
            taken.extend(range(first, first + self._free.take_at(first, count)))
        taken.extend(self._free.take(count - len(taken)))
        blocks = tuple(BlockId(block) for block in taken)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def incref(self, blocks: Iterable[BlockId]) -> None:
        """Adds a reference to blocks that are referenced or cached."""
        references, cached = self._references, self._cached
        for block in blocks:
            if block in references:
                references[block] += 1
                continue
            assert block in cached, f"block {block} is free"
            del cached[block]
            references[block] = 1

    def fork(self, blocks: Sequence[BlockId]) -> tuple[BlockId, ...]:
        """Returns a second table over the same blocks, with references of its own."""
        self.incref(blocks)
        return tuple(blocks)

    def free(self, blocks: Sequence[BlockId]) -> None:
        """Drops one reference of each block of a table.

        The last block goes first: a prefix is used by more sequences than what follows it, so
        it is to be evicted later.
        """
        freed: list[BlockId] = []
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count:
                self._references[block] = count
                continue
            del self._references[block]
            if block in self._kept:
                self._cached[block] = None
            else:
                freed.append(block)
        self._free.add(freed)

    def keep(self, block: BlockId) -> None:
        """Marks a referenced block: it becomes cached, not free, with its last reference."""
        assert block in self._references, f"block {block} has no owner"
        self._kept.add(block)

    def forget(self, block: BlockId) -> None:
        """Takes the mark back; a cached block becomes free."""
        self._kept.remove(block)
        if block in self._cached:
            del self._cached[block]
            self._free.add((block,))

    def evict(self, count: int) -> tuple[BlockId, ...]:
        """Frees the `count` longest unused cached blocks (or all there are) and names them."""
        evicted = tuple(islice(self._cached, max(count, 0)))
        for block in evicted:
            del self._cached[block]
        self._kept.difference_update(evicted)
        self._free.add(evicted)
        return evicted

    def make_writable(self, table: list[BlockId], index: int) -> tuple[BlockId, BlockId] | None:
        """Gives a table its own block at `index` if others read it: copy-on-write.

        Returns:
            The copy (source, target) to make before the block is written, or None if the block
            was the table's own. The source stays with its other owners, or cached.

        Raises:
            NoFreeBlocks: a copy is needed and no block is free.
        """
        source = table[index]
        if not self.is_shared(source) and source not in self._kept:
            return None
        (target,) = self.allocate(1, table[index - 1] if index else None)
        table[index] = target
        self.free((source,))
        return source, target

    def check(self) -> None:
        """Asserts that every block is in exactly one state."""
        free = [BlockId(block) for block in self._free]
        assert len(free) == len(set(free)) == self.num_free
        states = [*free, *self._cached, *self._references]
        assert sorted(states) == list(range(self.num_blocks)), "a block is lost or held twice"
        assert all(count > 0 for count in self._references.values())
        assert self._kept <= self._cached.keys() | self._references.keys()
        assert self._cached.keys() <= self._kept
