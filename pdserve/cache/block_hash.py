"""Names for the content of KV blocks: a chain of SHA-256 digests over tenant, model and tokens.

    root    = sha256(field("pdserve.kv.v1") + field(tenant salt) + field(model revision))
    hash[i] = sha256(field(hash[i - 1] or root) + field(tokens of block i, 32 bits each))

A field is its length as 64 bits and its bytes, so no two inputs share an encoding. Nothing
depends on the process, so every worker and router names a block alike.
"""

import hashlib
import struct
from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import NewType

from pdserve.cache.granule_hash import GRANULE_TOKENS, GranuleChain

BlockHash = NewType("BlockHash", bytes)

_DOMAIN = b"pdserve.kv.v1"
_PARENT_LENGTH = hashlib.sha256().digest_size.to_bytes(8, "little")


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
    """The tokens of one growing sequence, and the hashes of its full blocks.

    Each hash is made once, when it is first asked for: a prompt of which nothing is cached is
    hashed while it is computed, not before. Tokens lie in an array, where the garbage collector
    does not look at each of them: 256 sequences of 2,000 in lists cost a full collection 20 ms.
    """

    def __init__(
        self, token_ids: Iterable[int], block_size: int, tenant_salt: bytes, revision: str
    ) -> None:
        """Starts with `token_ids`."""
        self.block_size = block_size
        self._tail = hash_root(tenant_salt, revision)
        self._token_ids = array("I", token_ids)
        self._hashes: list[BlockHash] = []
        self._granules = GranuleChain(tenant_salt)

    def __len__(self) -> int:
        """Counts tokens."""
        return len(self._token_ids)

    @property
    def num_full_blocks(self) -> int:
        """Blocks that have a hash, made or not."""
        return len(self) // self.block_size

    @property
    def last(self) -> int:
        """The last token; there is one."""
        return self._token_ids[-1]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens."""
        self._token_ids.extend(token_ids)

    def append(self, token_id: int) -> None:
        """Appends one token: what a sequence does in each step."""
        self._token_ids.append(token_id)

    def append_copies(self, token_id: int, count: int) -> None:
        """Appends one token so many times: what many steps at once do in a simulation."""
        self.extend((token_id,) * count)

    def fork(self) -> "HashChain":
        """Returns a chain of the same tokens that grows by itself."""
        twin = HashChain((), self.block_size, b"", "")
        twin._tail = self._tail
        twin._token_ids = self._token_ids[:]
        twin._hashes = self._hashes.copy()
        twin._granules = self._granules.fork()
        return twin

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Returns the tokens at positions [start, end)."""
        return tuple(self._token_ids[start:end])

    def block_content(self, index: int) -> Hashable:
        """Returns what is equal for full blocks of equal tokens only."""
        return self._block_bytes(index)

    def block_hash(self, index: int) -> BlockHash:
        """Returns the hash of a full block."""
        hashes = self._hashes
        while index >= len(hashes):
            self._tail = _hash_content(self._tail, self._block_bytes(len(hashes)))
            hashes.append(self._tail)
        return hashes[index]

    def granule_key(self, index: int) -> int:
        """Returns the key of a full granule; made when it is first asked for."""
        keys = self._granules.keys
        if index >= len(keys):
            end = (index + 1) * GRANULE_TOKENS
            self._granules.extend(self._token_ids[len(keys) * GRANULE_TOKENS : end])
        return keys[index]

    def _block_bytes(self, index: int) -> bytes:
        size = self.block_size
        return self._token_ids[index * size : (index + 1) * size].tobytes()


def _hash_content(parent: BlockHash, content: bytes) -> BlockHash:
    """Returns `_digest` of both in half the time, which counts before a cached prompt."""
    length = len(content).to_bytes(8, "little")
    return BlockHash(hashlib.sha256(_PARENT_LENGTH + parent + length + content).digest())


def _digest(*fields: bytes) -> BlockHash:
    digest = hashlib.sha256()
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return BlockHash(digest.digest())
