"""What a choice costs, for many workers at once: the predictor's laws as columns over a fleet.

While the laws of a pool are not all known, everything is counted in KV blocks by the same code:

    prefill  = blocks to compute        p = (0, 1 / block, 0)
    decode   = blocks held and to add   d = (0, 0, 1 / block)
    transfer = 0                        t = (0, 0)
"""

from dataclasses import dataclass

import numpy as np

from pdserve.predictor.predictor import (
    DecodeSample,
    Predictor,
    PrefillSample,
    Sample,
    TransferSample,
)
from pdserve.request import Role
from router.fleet import BoolArray, Fleet, FloatArray

REFRESH_S = 0.5
"""New coefficients count after this long at the latest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Laws:
    """Coefficients by row, one array a coefficient."""

    is_fitted: bool
    """Costs are seconds; else KV blocks."""
    prefill: FloatArray
    """[3, rows]."""
    decode: FloatArray
    """[3, rows]."""
    transfer: FloatArray
    """[2, rows], of the sender."""
    handoff_per_token: FloatArray
    """[rows] of receivers: what a token adds to a hand-off by the slowest sender."""
    knows_prefill: BoolArray
    """[rows]: whether the prefill law is known; that of a decode worker may be missing."""


class LawTable:
    """Keeps the columns up to date."""

    def __init__(self, fleet: Fleet, predictor: Predictor) -> None:
        """Reads both; the predictor is fed by others."""
        self._fleet = fleet
        self._predictor = predictor
        self._laws: Laws | None = None
        self._version = 0
        self._made_at_s = 0.0

    def laws(self, now_s: float) -> Laws:
        """Returns the columns as of this instant, or of a moment ago."""
        laws = self._laws
        if (
            laws is None
            or self._version != self._fleet.version
            or not 0 <= now_s - self._made_at_s < REFRESH_S
        ):
            laws = self._laws = self._make()
            self._version, self._made_at_s = self._fleet.version, now_s
        return laws

    def drain_s(self, num_tokens: float, role: Role, now_s: float) -> float | None:
        """Returns how long a pool takes for so many tokens of prompts; None while not known.

        Counts whole steps, shared by all workers of the pool.
        """
        fleet, laws = self._fleet, self.laws(now_s)
        usable = fleet.usable(role, (), now_s)
        if not laws.is_fitted or not usable.any():
            return None
        fixed, per_token, per_pair = laws.prefill[:, usable]
        chunk = fleet.chunk_tokens[usable]
        token_s = fixed / chunk + per_token + per_pair * chunk / 2
        return float(num_tokens / (1.0 / token_s).sum())

    def _make(self) -> Laws:
        fleet = self._fleet
        columns: dict[type[Sample], FloatArray] = {
            PrefillSample: np.zeros((3, fleet.capacity)),
            DecodeSample: np.zeros((3, fleet.capacity)),
            TransferSample: np.zeros((2, fleet.capacity)),
        }
        knows: dict[type[Sample], BoolArray] = {
            kind: np.zeros(fleet.capacity, dtype=np.bool_) for kind in columns
        }
        found: dict[tuple[str, type[Sample]], tuple[float, ...] | None] = {}
        for row, member in fleet.members():
            for kind in columns:
                name = member.worker_class, kind
                if name not in found:
                    found[name] = self._predictor.law(*name)
                law = found[name]
                if law is not None:
                    columns[kind][:, row] = law
                    knows[kind][row] = True
        if not self._is_fitted(knows):
            return in_blocks(fleet)
        return Laws(
            is_fitted=True,
            prefill=columns[PrefillSample],
            decode=columns[DecodeSample],
            transfer=columns[TransferSample],
            handoff_per_token=columns[TransferSample][1].max() * fleet.kv_bytes_per_token,
            knows_prefill=knows[PrefillSample],
        )

    def _is_fitted(self, knows: dict[type[Sample], BoolArray]) -> bool:
        """Says whether every law that a choice needs is known."""
        prefills = [row for row, one in self._fleet.members() if one.role is Role.PREFILL]
        decodes = [row for row, one in self._fleet.members() if one.role is Role.DECODE]
        needed: list[tuple[type[Sample], list[int]]] = [
            (DecodeSample, decodes),
            (PrefillSample, prefills or decodes),
            (TransferSample, prefills),
        ]
        return bool(decodes) and all(knows[kind][rows].all() for kind, rows in needed)


def in_blocks(fleet: Fleet) -> Laws:
    """Returns the laws that count KV blocks."""
    per_token = 1.0 / np.maximum(fleet.block_size, 1.0)
    prefill = np.zeros((3, fleet.capacity))
    decode = np.zeros((3, fleet.capacity))
    prefill[1], decode[2] = per_token, per_token
    return Laws(
        is_fitted=False,
        prefill=prefill,
        decode=decode,
        transfer=np.zeros((2, fleet.capacity)),
        handoff_per_token=np.zeros(fleet.capacity),
        knows_prefill=np.ones(fleet.capacity, dtype=np.bool_),
    )


def prefill_terms(num_tokens: float, num_context_tokens: float) -> tuple[float, float, float]:
    """Returns the terms of the prefill law, see `Predictor`."""
    return (1.0, num_tokens, num_tokens * (num_context_tokens + num_tokens / 2))


def queue_cost(fleet: Fleet, laws: Laws, now_s: float) -> FloatArray:
    """Returns how long a prompt waits for those before it: what has passed of the first is over."""
    cost: FloatArray = np.einsum("ij,ij->j", laws.prefill, fleet.queue + fleet.others_queue)
    if laws.is_fitted:
        head_s = np.einsum("ij,ij->j", laws.prefill, fleet.head)
        np.subtract(cost, np.minimum(now_s - fleet.head_since_s, head_s), out=cost)
        np.maximum(cost, 0.0, out=cost)
    return cost


def prefill_cost(laws: Laws, uncached: FloatArray, cached: FloatArray) -> FloatArray:
    """Returns what computing the uncached rest of a prompt takes."""
    fixed, per_token, per_pair = laws.prefill
    cost: FloatArray = fixed + uncached * (per_token + per_pair * (cached + 0.5 * uncached))
    return cost


def decode_load(fleet: Fleet, laws: Laws) -> tuple[FloatArray, FloatArray]:
    """Returns the sequences that decode, and the tokens that they hold."""
    seqs = fleet.num_seqs + fleet.others_seqs
    if laws.is_fitted:
        return seqs, fleet.kv_tokens + fleet.others_kv_tokens
    # What sequences may grow to stands for the work that they still are.
    return seqs, fleet.blocks * fleet.block_size + fleet.others_kv_tokens


def step_cost(laws: Laws, seqs: FloatArray, kv_tokens: FloatArray) -> FloatArray:
    """Returns what a step of decoding takes."""
    fixed, per_sequence, per_token = laws.decode
    cost: FloatArray = fixed + per_sequence * seqs + per_token * kv_tokens
    return cost


def room_wait_s(
    fleet: Fleet,
    need: tuple[float, float],
    load: tuple[FloatArray, FloatArray],
    life_s: FloatArray,
) -> FloatArray:
    """Returns how long sequences wait until decode has room for them.

    Args:
        fleet: its members' sizes.
        need: sequences, and tokens of KV.
        load: the same of those that are there.
        life_s: how long one of those stays.
    """
    seqs, kv_tokens = load
    missing_tokens = kv_tokens - (fleet.room_tokens - need[1])
    missing_seqs = seqs - (fleet.max_num_seqs - need[0])
    if max(missing_tokens.max(), missing_seqs.max()) <= 0:
        return np.zeros(len(seqs))
    # Sequences end one after another over the time that one stays, and free their share.
    share = np.maximum(
        missing_tokens / np.maximum(kv_tokens, 1.0), missing_seqs / np.maximum(seqs, 1.0)
    )
    wait: FloatArray = life_s * np.clip(share, 0.0, 1.0)
    return wait
