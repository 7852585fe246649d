"""Which granules of 128 tokens a prefix cache holds wholly, told as a list of changes.

A granule is present while a look-up would hit every block up to its end. So what is present is
closed under prefixes: when a block goes, its granules go, and all that extend them.

If blocks do not divide a granule, two blocks with different tokens behind the granule's end may
both hold that end. Only the first of them is noted, so less may be told than is there, never more.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdserve.request import BlockId


class GranuleChange(NamedTuple):
    """A granule came or went."""

    key: int
    is_removed: bool


@dataclass(slots=True)
class GranuleChanges:
    """Several changes in order, as columns: what is sent on in bytes anyway."""

    keys: "array[int]" = field(default_factory=lambda: array("Q"))
    is_removed: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[GranuleChange]:
        return map(GranuleChange, self.keys, map(bool, self.is_removed))


@dataclass(slots=True)
class _Granule:
    parent: int | None
    blocks: Sequence[BlockId]
    """All that hold a token of it."""
    child: int | None = None
    """One of those that extend it, if any do; most have no other."""
    children: set[int] | None = None
    """The others."""


class CachedGranules:
    """Follows one prefix cache; engine thread only."""

    def __init__(self) -> None:
        """Nothing is cached."""
        self._granules: dict[int, _Granule] = {}
        self._keys_of: dict[BlockId, tuple[int, ...]] = {}
        self.changes = GranuleChanges()
        """Since they were last taken."""

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
        granules, keys_of = self._granules, self._keys_of
        granules[key] = _Granule(parent, blocks)
        if parent is not None:
            before = granules[parent]
            if before.child is None:
                before.child = key
            elif before.children is None:
                before.children = {key}
            else:
                before.children.add(key)
        for block in blocks:
            keys = keys_of.get(block)
            keys_of[block] = (key,) if keys is None else (*keys, key)
        changes = self.changes
        changes.keys.append(key)
        changes.is_removed.append(False)

    def evict(self, blocks: Iterable[BlockId]) -> None:
        """Notes that blocks left the cache."""
        for block in blocks:
            for key in self._keys_of.get(block, ()):
                self._remove(key)

    def take_changes(self) -> GranuleChanges:
        """Returns, once, what changed, in order."""
        changes, self.changes = self.changes, GranuleChanges()
        return changes

    def _remove(self, key: int) -> None:
        """Removes a granule and what extends it; leaves first."""
        granules = self._granules
        doomed = [key] if key in granules else []
        for each in doomed:
            granule = granules[each]
            if granule.child is not None:
                doomed.append(granule.child)
            if granule.children:
                doomed.extend(granule.children)
        for each in reversed(doomed):
            self._remove_leaf(each)

    def _remove_leaf(self, key: int) -> None:
        granule, keys_of = self._granules.pop(key), self._keys_of
        before = None if granule.parent is None else self._granules.get(granule.parent)
        if before is not None:
            if before.child == key:
                before.child = before.children.pop() if before.children else None
            elif before.children is not None:
                before.children.discard(key)
        for block in granule.blocks:
            keys = keys_of[block]
            if len(keys) == 1:
                del keys_of[block]
            else:
                keys_of[block] = tuple([other for other in keys if other != key])
        self.changes.keys.append(key)
        self.changes.is_removed.append(True)
