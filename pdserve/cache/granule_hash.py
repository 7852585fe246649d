"""Names for prefixes in granules of 128 tokens: the unit in which routers think of caches.

    root   = sha256(length of the tenant salt as 64 bits + tenant salt)
    sum[i] = sha256(sum[i - 1] or root + tokens of granule i, 32 bits each)
    key[i] = the first 64 bits of sum[i]

A key stands for all tokens up to the end of its granule. Routers and workers compute the same ones.
They only hint at what is cached where: workers verify full digests and token ids.
"""

import hashlib
from array import array
from collections.abc import Sequence

GRANULE_TOKENS = 128
_KEY_BYTES = 8


def hash_granules(token_ids: Sequence[int], tenant_salt: bytes = b"") -> "array[int]":
    """Returns one key per full granule; each covers all tokens up to its end.

    They lie in an array, whose memory an index reads as it is: 1,024 ints of a tuple take 40 us.
    """
    chain = GranuleChain(tenant_salt)
    chain.extend(token_ids)
    return chain.keys


class GranuleChain:
    """The keys of one growing sequence, each made once."""

    def __init__(self, tenant_salt: bytes = b"") -> None:
        """Covers no tokens yet."""
        length = len(tenant_salt).to_bytes(8, "little")
        self._tail = hashlib.sha256(length + tenant_salt).digest()
        self.keys = array("Q")
        """One for each granule so far."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds the full granules among the tokens that follow those covered so far."""
        tokens = array("I", token_ids)
        size = GRANULE_TOKENS * tokens.itemsize
        # One conversion for all: 131,072 tokens take 2.5 ms of the event loop instead of 4.
        view = memoryview(tokens).cast("B")
        previous = self._tail
        for start in range(0, len(view) - size + 1, size):
            previous = hashlib.sha256(previous + view[start : start + size]).digest()
            self.keys.append(int.from_bytes(previous[:_KEY_BYTES], "little"))
        self._tail = previous

    def fork(self) -> "GranuleChain":
        """Returns a chain of the same granules that grows by itself."""
        twin = GranuleChain()
        twin._tail = self._tail
        twin.keys = self.keys[:]
        return twin
