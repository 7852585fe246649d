"""Which granules of 128 tokens a prefix cache holds wholly, told as a list of changes.

A granule is present while a look-up would hit every block up to its end. So what is present is
closed under prefixes: when a block goes, its granules go, and all that extend them.

If blocks do not divide a granule, two blocks with different tokens behind the granule's end may
both hold that end. Only the first of them is noted, so less may be told than is there, never more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdserve.request import BlockId


class GranuleChange(NamedTuple):
    """A granule came or went."""

    key: int
    is_removed: bool


@dataclass(slots=True)
class _Granule:
    parent: int | None
    blocks: Sequence[BlockId]
    """All that hold a token of it."""
    children: set[int] = field(default_factory=set)


class CachedGranules:
    """Follows one prefix cache; engine thread only."""

    def __init__(self) -> None:
        """Nothing is cached."""
        self._granules: dict[int, _Granule] = {}
        self._keys_of: dict[BlockId, set[int]] = {}
        self._changes: list[GranuleChange] = []

    def __len__(self) -> int:
        return len(self._granules)

    def keys(self) -> frozenset[int]:
        """Returns what is present."""
        return frozenset(self._granules)

    def has(self, key: int) -> bool:
        """Says whether a granule is present."""
        return key in self._granules

    def add(self, key: int, parent: int | None, blocks: Sequence[BlockId]) -> None:
        """Notes that a granule became present.

        Args:
            key: of the granule; it is not present yet.
            parent: key of the granule before it, which is present; None: there is none.
            blocks: all that hold a token of it.
        """
        self._granules[key] = _Granule(parent, blocks)
        if parent is not None:
            self._granules[parent].children.add(key)
        for block in blocks:
            self._keys_of.setdefault(block, set()).add(key)
        self._changes.append(GranuleChange(key, is_removed=False))

    def evict(self, blocks: Iterable[BlockId]) -> None:
        """Notes that blocks left the cache."""
        for block in blocks:
            for key in self._keys_of.get(block, set()).copy():
                self._remove(key)

    def take_changes(self) -> list[GranuleChange]:
        """Returns, once, what changed, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _remove(self, key: int) -> None:
        """Removes a granule and what extends it; leaves first."""
        doomed = [key] if key in self._granules else []
        for each in doomed:
            doomed.extend(self._granules[each].children)
        for each in reversed(doomed):
            granule = self._granules.pop(each)
            if granule.parent in self._granules:
                self._granules[granule.parent].children.discard(each)
            for block in granule.blocks:
                keys = self._keys_of[block]
                keys.discard(each)
                if not keys:
                    del self._keys_of[block]
            self._changes.append(GranuleChange(each, is_removed=True))
