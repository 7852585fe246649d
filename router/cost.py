"""What a choice costs, for many workers at once: the predictor's laws as columns over a fleet.

While the laws of a pool are not all known, everything is counted in KV blocks by the same code:

    prefill  = blocks to compute        p = (0, 1 / block, 0)
    decode   = blocks held and to add   d = (0, 0, 1 / block)
    transfer = 0                        t = (0, 0)
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pdserve.predictor.predictor import (
    DecodeSample,
    Predictor,
    PrefillSample,
    Sample,
    TransferSample,
)
from pdserve.request import Role
from router.fleet import BoolArray, Fleet, FloatArray, IntArray

Number = TypeVar("Number", float, FloatArray)
Law = tuple[float, float, float] | FloatArray

REFRESH_S = 0.5
"""New coefficients count after this long at the latest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Laws:
    """Coefficients by kind of worker: those of one kind are alike; kind 0 is nobody."""

    is_fitted: bool
    """Costs are seconds; else KV blocks."""
    kind_of: IntArray
    """[rows]."""
    prefill: FloatArray
    """[3, kinds]."""
    decode: FloatArray
    """[3, kinds]."""
    transfer: FloatArray
    """[2, kinds], of the sender."""
    handoff_per_token: FloatArray
    """[kinds] of receivers: what a token adds to a hand-off by the slowest sender."""
    knows_prefill: BoolArray
    """[kinds]: whether the prefill law is known; that of a decode worker may be missing."""
    kinds: tuple["KindLaws", ...]
    """The same as plain numbers."""

    @property
    def is_uniform(self) -> bool:
        """All workers are alike: numbers do where arrays are needed otherwise."""
        return len(self.kinds) == 2

    def spread(self, values: list[float], rows: IntArray | None = None) -> FloatArray | float:
        """Returns, of values by kind, those of all rows or of some; a number if all are alike."""
        if self.is_uniform:
            return values[1]
        return np.array(values).take(self.kind_of if rows is None else self.kind_of[rows])

    def prefill_of(self, rows: IntArray) -> FloatArray:
        """Returns the prefill laws of some rows, [3, rows]."""
        laws: FloatArray = self.prefill[:, self.kind_of[rows]]
        return laws


@dataclass(frozen=True, kw_only=True, slots=True)
class KindLaws:
    """Coefficients of one kind of worker."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    transfer: tuple[float, float]
    handoff: float
    """What a token adds to a hand-off, by the slowest sender."""
    knows_prefill: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    worker_class: str
    kv_bytes_per_token: int
    block_size: int


class LawTable:
    """Keeps the columns up to date."""

    def __init__(self, fleet: Fleet, predictor: Predictor) -> None:
        """Reads both; the predictor is fed by others."""
        self._fleet = fleet
        self._predictor = predictor
        self._laws: Laws | None = None
        self._version: int | None = None
        self._made_at_s = 0.0
        self._kinds: list[_Kind] = []
        self._kind_of: IntArray = np.zeros(0, dtype=np.int64)
        self._needed: set[tuple[str, type[Sample]]] = set()
        """The laws that a choice needs."""

    def laws(self, now_s: float) -> Laws:
        """Returns the laws as of this instant, or of a moment ago."""
        laws = self._laws
        if (
            laws is None
            or self._version != self._fleet.version
            or not 0 <= now_s - self._made_at_s < REFRESH_S
        ):
            if self._version != self._fleet.version:
                self._sort_kinds()
                self._version = self._fleet.version
            laws = self._laws = self._make()
            self._made_at_s = now_s
        return laws

    def drain_s(self, num_tokens: float, role: Role, now_s: float) -> float | None:
        """Returns how long a pool takes for so many tokens of prompts; None while not known.

        Counts whole steps, shared by all workers of the pool.
        """
        fleet, laws = self._fleet, self.laws(now_s)
        usable = fleet.usable(role, (), now_s)
        if not laws.is_fitted or not usable.any():
            return None
        fixed, per_token, per_pair = laws.prefill[:, laws.kind_of[usable]]
        chunk = fleet.chunk_tokens[usable]
        token_s = fixed / chunk + per_token + per_pair * chunk / 2
        return float(num_tokens / (1.0 / token_s).sum())

    def _sort_kinds(self) -> None:
        kinds: dict[_Kind, int] = {}
        kind_of = np.zeros(self._fleet.capacity, dtype=np.int64)
        decodes: set[str] = set()
        prefills: set[str] = set()
        for row, one in self._fleet.members():
            kind = _Kind(one.worker_class, one.kv_bytes_per_token, one.block_size)
            kind_of[row] = kinds.setdefault(kind, len(kinds) + 1)
            (prefills if one.role is Role.PREFILL else decodes).add(one.worker_class)
        self._kinds, self._kind_of = list(kinds), kind_of
        self._needed = {(each, DecodeSample) for each in decodes}
        self._needed |= {(each, PrefillSample) for each in prefills or decodes}
        self._needed |= {(each, TransferSample) for each in prefills}

    def _make(self) -> Laws:
        classes = {kind.worker_class for kind in self._kinds}
        found = {
            (one, sample): self._predictor.law(one, sample)
            for one in classes
            for sample in (PrefillSample, DecodeSample, TransferSample)
        }
        has_decode = any(sample is DecodeSample for _, sample in self._needed)
        if not has_decode or any(found[name] is None for name in self._needed):
            return self._in_blocks()

        def columns(sample: type[Sample], num_terms: int) -> FloatArray:
            none = (0.0,) * num_terms
            laws = [found[kind.worker_class, sample] or none for kind in self._kinds]
            return np.array([none, *laws]).T

        sizes = np.array([0.0, *(kind.kv_bytes_per_token for kind in self._kinds)])
        knows = [found[kind.worker_class, PrefillSample] is not None for kind in self._kinds]
        transfer = columns(TransferSample, 2)
        return self._with_kinds(
            prefill=columns(PrefillSample, 3),
            decode=columns(DecodeSample, 3),
            transfer=transfer,
            handoff_per_token=transfer[1].max() * sizes,
            knows_prefill=np.array([False, *knows]),
            is_fitted=True,
        )

    def _in_blocks(self) -> Laws:
        """Returns the laws that count KV blocks."""
        per_token = np.array([0.0, *(1.0 / kind.block_size for kind in self._kinds)])
        none = np.zeros(len(per_token))
        return self._with_kinds(
            prefill=np.array([none, per_token, none]),
            decode=np.array([none, none, per_token]),
            transfer=np.array([none, none]),
            handoff_per_token=none,
            knows_prefill=none == 0.0,
            is_fitted=False,
        )

    def _with_kinds(
        self,
        *,
        prefill: FloatArray,
        decode: FloatArray,
        transfer: FloatArray,
        handoff_per_token: FloatArray,
        knows_prefill: BoolArray,
        is_fitted: bool,
    ) -> Laws:
        columns = zip(
            prefill.T.tolist(),
            decode.T.tolist(),
            transfer.T.tolist(),
            handoff_per_token.tolist(),
            knows_prefill.tolist(),
            strict=True,
        )
        return Laws(
            is_fitted=is_fitted,
            kind_of=self._kind_of,
            prefill=prefill,
            decode=decode,
            transfer=transfer,
            handoff_per_token=handoff_per_token,
            knows_prefill=knows_prefill,
            kinds=tuple(
                KindLaws(
                    prefill=(p0, p1, p2),
                    decode=(d0, d1, d2),
                    transfer=(t0, t1),
                    handoff=handoff,
                    knows_prefill=knows,
                )
                for (p0, p1, p2), (d0, d1, d2), (t0, t1), handoff, knows in columns
            ),
        )


def prefill_terms(num_tokens: float, num_context_tokens: float) -> tuple[float, float, float]:
    """Returns the terms of the prefill law, see `Predictor`."""
    return (1.0, num_tokens, num_tokens * (num_context_tokens + num_tokens / 2))


def prefill_cost(law: Law, uncached: Number, cached: Number) -> Number:
    """Returns what computing the uncached rest of a prompt takes, of one worker or of many."""
    fixed, per_token, per_pair = law
    return fixed + uncached * (per_token + per_pair * (cached + 0.5 * uncached))


def share_to_free(
    load: tuple[FloatArray, FloatArray],
    need: tuple[float, float],
    room: tuple[FloatArray, FloatArray],
) -> FloatArray | None:
    """Returns which part of its load a decode worker must lose before it has room for more.

    Sequences end one after another over the time that one stays, and free their share.

    Args:
        load: sequences, and tokens of KV, that are there.
        need: those that come.
        room: those that fit.

    Returns:
        None if all have room.
    """
    share: FloatArray | None = None
    for held, more, place in zip(load, need, room, strict=True):
        missing = held - place
        missing += more
        if missing.max() > 0:
            missing /= np.maximum(held, 1.0)
            share = missing if share is None else np.maximum(share, missing)
    return None if share is None else np.minimum(np.maximum(share, 0.0), 1.0)
