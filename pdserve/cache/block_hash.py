"""Names for the content of KV blocks: a chain of SHA-256 digests over tenant, model and tokens.

    root    = sha256(field("pdserve.kv.v1") + field(tenant salt) + field(model revision))
    hash[i] = sha256(field(hash[i - 1] or root) + field(tokens of block i, 32 bits each))

A field is its length as 64 bits and its bytes, so no two inputs share an encoding. Nothing
depends on the process, so every worker and router names a block alike.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NewType

from pdserve.cache.granule_hash import GRANULE_TOKENS, GranuleChain

BlockHash = NewType("BlockHash", bytes)

_DOMAIN = b"pdserve.kv.v1"


def hash_root(tenant_salt: bytes, revision: str) -> BlockHash:
    """Returns what the first block is chained to; tenants and models never share a chain."""
    return _digest(_DOMAIN, tenant_salt, revision.encode())


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Returns the hash of a block of tokens that follows the block named `parent`."""
    return _digest(parent, struct.pack(f"<{len(token_ids)}I", *token_ids))


def hash_blocks(
    token_ids: Sequence[int], block_size: int, tenant_salt: bytes, revision: str
) -> tuple[BlockHash, ...]:
    """Returns one hash for each full block; tokens behind the last full block have none."""
    parent = hash_root(tenant_salt, revision)
    hashes: list[BlockHash] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return tuple(hashes)


class HashChain:
    """The tokens of one growing sequence, and the hashes of its full blocks, each made once."""

    def __init__(
        self, token_ids: Iterable[int], block_size: int, tenant_salt: bytes, revision: str
    ) -> None:
        """Starts with `token_ids`; every full block among them is hashed now."""
        self.block_size = block_size
        self._tail = hash_root(tenant_salt, revision)
        self._token_ids: list[int] = []
        self._hashes: list[BlockHash] = []
        self._granules = GranuleChain(tenant_salt)
        self.extend(token_ids)

    def __len__(self) -> int:
        """Counts tokens."""
        return len(self._token_ids)

    @property
    def num_full_blocks(self) -> int:
        """Blocks that have a hash."""
        return len(self._hashes)

    @property
    def last(self) -> int:
        """The last token; there is one."""
        return self._token_ids[-1]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens and hashes the blocks that become full."""
        self._token_ids.extend(token_ids)
        for index in range(len(self._hashes), len(self._token_ids) // self.block_size):
            self._tail = hash_block(self._tail, self.block_tokens(index))
            self._hashes.append(self._tail)

    def append(self, token_id: int) -> None:
        """Appends one token: what a sequence does in each step."""
        self._token_ids.append(token_id)
        if len(self._token_ids) % self.block_size == 0:
            self.extend(())

    def fork(self) -> "HashChain":
        """Returns a chain of the same tokens that grows by itself."""
        twin = HashChain((), self.block_size, b"", "")
        twin._tail = self._tail
        twin._token_ids = self._token_ids.copy()
        twin._hashes = self._hashes.copy()
        twin._granules = self._granules.fork()
        return twin

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Returns the tokens at positions [start, end)."""
        return tuple(self._token_ids[start:end])

    def block_tokens(self, index: int) -> tuple[int, ...]:
        """Returns the tokens of a full block."""
        return self.tokens(index * self.block_size, (index + 1) * self.block_size)

    def block_hash(self, index: int) -> BlockHash:
        """Returns the hash of a full block."""
        return self._hashes[index]

    def granule_key(self, index: int) -> int:
        """Returns the key of a full granule; made when it is first asked for."""
        keys = self._granules.keys
        if index >= len(keys):
            end = (index + 1) * GRANULE_TOKENS
            self._granules.extend(self._token_ids[len(keys) * GRANULE_TOKENS : end])
        return keys[index]


def _digest(*fields: bytes) -> BlockHash:
    digest = hashlib.sha256()
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return BlockHash(digest.digest())
