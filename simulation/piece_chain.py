"""The chain of a simulated request: names of blocks without a token in memory.

Tokens come in runs of equal ones, see `workload`, so a block is told by its runs, and a hash of 64
bits tells it from the others as SHA-256 does in production. Everything that asks a `HashChain`
gets the same answers, but for the digests.
"""

from array import array
from collections.abc import Iterable
from itertools import groupby

from pdserve.cache.block_hash import BlockHash, HashChain
from router.prefix_index import GRANULE_TOKENS
from simulation.workload import Piece

_MASK = 2**64 - 1


class PieceChain(HashChain):
    """Runs of tokens, cut into blocks."""

    def __init__(self, pieces: Iterable[Piece], block_size: int) -> None:
        """Starts with some runs."""
        # Nothing else of the base's: all that reads it is done another way here.
        self.block_size = block_size
        self._hashes: list[BlockHash] = []
        self._runs: list[Piece] = []
        self._blocks: list[tuple[int, ...]] = []
        """Of each full block: content and length of each run, or the content alone."""
        self._keys: list[int] = []
        """The same hashes as numbers."""
        self._granule_blocks = GRANULE_TOKENS // block_size
        self._rest: tuple[int, ...] = ()
        self._num_rest = 0
        self._num_tokens = 0
        self._last_hash = 0
        for content, num_tokens in pieces:
            self.append_copies(content, num_tokens)

    def __len__(self) -> int:
        """Counts tokens."""
        return self._num_tokens

    @property
    def last(self) -> int:
        """The last token; there is one."""
        return self._runs[-1].content

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens."""
        for content, run in groupby(token_ids):
            self.append_copies(content, sum(1 for _ in run))

    def append(self, token_id: int) -> None:
        """Appends one token."""
        self.append_copies(token_id, 1)

    def append_copies(self, token_id: int, count: int) -> None:
        """Appends a run."""
        if count <= 0:
            return
        size = self.block_size
        self._num_tokens += count
        if self._runs and self._runs[-1].content == token_id:
            self._runs[-1] = Piece(token_id, self._runs[-1].num_tokens + count)
        else:
            self._runs.append(Piece(token_id, count))
        if self._num_rest:
            taken = min(count, size - self._num_rest)
            self._rest = _join(self._rest, token_id, taken)
            self._num_rest += taken
            count -= taken
            if self._num_rest < size:
                return
            self._close(self._rest if len(self._rest) > 2 else self._rest[:1])
        for _ in range(count // size):
            self._close((token_id,))
        self._num_rest = count % size
        self._rest = (token_id, self._num_rest) if self._num_rest else ()

    def fork(self) -> "PieceChain":
        """Returns a chain of the same tokens that grows by itself."""
        twin = PieceChain((), self.block_size)
        twin._runs = self._runs.copy()
        twin._blocks = self._blocks.copy()
        twin._hashes, twin._keys = self._hashes.copy(), self._keys.copy()
        twin._rest, twin._num_rest = self._rest, self._num_rest
        twin._num_tokens, twin._last_hash = self._num_tokens, self._last_hash
        return twin

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Returns the tokens at positions [start, end)."""
        found: list[int] = []
        position = 0
        for content, num_tokens in self._runs:
            if position >= end:
                break
            count = min(end, position + num_tokens) - max(start, position)
            if count > 0:
                found += (content,) * count
            position += num_tokens
        return tuple(found)

    def block_content(self, index: int) -> tuple[int, ...]:
        """Returns what tells a full block from others: its runs."""
        return self._blocks[index]

    def block_hash(self, index: int) -> BlockHash:
        """Returns the hash of a full block; all are made at once."""
        return self._hashes[index]

    def granule_key(self, index: int) -> int:
        """Returns the key of a full granule: blocks divide it, see `ClusterShape`."""
        return self._keys[self._granule_blocks * (index + 1) - 1]

    def granules(self) -> "array[int]":
        """Returns keys for the router's index, one for each full granule."""
        return array("Q", self._keys[self._granule_blocks - 1 :: self._granule_blocks])

    def _close(self, block: tuple[int, ...]) -> None:
        # Of numbers, so it is the same in every process.
        self._last_hash = last = hash((self._last_hash, block)) & _MASK
        self._keys.append(last)
        self._hashes.append(BlockHash(last.to_bytes(8, "little")))
        self._blocks.append(block)
        self._rest, self._num_rest = (), 0


class PromptChains:
    """Chains of prompts, made once for all simulations of one workload; nobody appends to them."""

    def __init__(self) -> None:
        """Knows no prompt."""
        self._known: dict[tuple[int, tuple[Piece, ...]], PieceChain] = {}

    def of(self, pieces: tuple[Piece, ...], block_size: int) -> PieceChain:
        """Returns the chain of a prompt."""
        chain = self._known.get((block_size, pieces))
        if chain is None:
            chain = self._known[block_size, pieces] = PieceChain(pieces, block_size)
        return chain


def _join(runs: tuple[int, ...], content: int, count: int) -> tuple[int, ...]:
    if runs[-2] == content:
        return (*runs[:-1], runs[-1] + count)
    return (*runs, content, count)
