"""What each way of a request would cost: both sides' own terms, then pairs of the best of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from router.candidates import TERMS
from router.cost import Laws, prefill_cost, queue_cost
from router.fleet import Fleet, FloatArray, IntArray

SHORT_LIST = 8
"""So many of each side are looked at jointly, and so many ways are kept to explain the choice."""
MISSED_WEIGHT = 1e9
"""Puts a missed time per token above any cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSide:
    """Prefill workers, one entry each."""

    rows: IntArray
    queue: FloatArray
    time: FloatArray
    """Of computing the prompt."""
    num_chunks: FloatArray
    tie: FloatArray

    @property
    def own(self) -> FloatArray:
        """What they are shortened by."""
        own: FloatArray = self.queue + self.time + self.tie
        return own

    def part(self, index: IntArray) -> "PromptSide":
        """Returns some of them."""
        return PromptSide(
            rows=self.rows[index],
            queue=self.queue[index],
            time=self.time[index],
            num_chunks=self.num_chunks[index],
            tie=self.tie[index],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSide:
    """Decode workers, one entry each."""

    rows: IntArray
    uncached: FloatArray
    cached: FloatArray
    num_bytes: FloatArray
    """To be handed off."""
    seqs: FloatArray
    """That decode there now."""
    step: FloatArray
    wait: FloatArray
    missed: FloatArray
    """By how much the wanted time per token is missed."""
    transfer: FloatArray
    """What the hand-off adds at most, by the slowest sender."""
    tie: FloatArray

    @property
    def own(self) -> FloatArray:
        """What they are shortened by."""
        own: FloatArray = self.wait + self.step + self.transfer + self.tie
        return own + MISSED_WEIGHT * self.missed

    def part(self, index: IntArray) -> "DecodeSide":
        """Returns some of them."""
        return DecodeSide(
            rows=self.rows[index],
            uncached=self.uncached[index],
            cached=self.cached[index],
            num_bytes=self.num_bytes[index],
            seqs=self.seqs[index],
            step=self.step[index],
            wait=self.wait[index],
            missed=self.missed[index],
            transfer=self.transfer[index],
            tie=self.tie[index],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """Ways of a request, one entry each."""

    computes: IntArray
    """Rows of the workers that compute the prompt."""
    decodes: IntArray
    """Rows of those that decode; the same for the local path."""
    terms: FloatArray
    """[TERMS, ways]."""
    link_until: FloatArray
    """When the hand-off will be through, from now."""
    rank: FloatArray
    """What they are picked by."""

    def best(self) -> IntArray:
        """Returns the short list, the best first."""
        return np.argsort(self.rank, kind="stable")[:SHORT_LIST]


def shortened(own: FloatArray) -> IntArray:
    """Returns the best few of a side, in their order there."""
    if len(own) <= SHORT_LIST:
        return np.arange(len(own))
    return np.sort(np.argpartition(own, SHORT_LIST)[:SHORT_LIST])


def pair_ways(
    fleet: Fleet, laws: Laws, prompt: PromptSide, decode: DecodeSide, now_s: float
) -> Ways:
    """Returns all pairs of two sides: prefill there, decode here."""
    prompt, decode = prompt.part(shortened(prompt.own)), decode.part(shortened(decode.own))
    shape = len(prompt.rows), len(decode.rows)
    fixed, per_byte = laws.transfer[:, prompt.rows, None]
    transfer = fixed + per_byte * decode.num_bytes
    num_chunks, time = prompt.num_chunks[:, None], prompt.time[:, None]
    # All chunks but the last travel while later ones are computed.
    hidden = time * (1.0 - 1.0 / num_chunks)
    ready = (prompt.queue + prompt.time)[:, None]
    busy_until_s = np.maximum(
        fleet.link_until_s[prompt.rows, None], fleet.link_until_s[decode.rows]
    )
    landed = ready + np.maximum(transfer - hidden, transfer / num_chunks)
    if laws.is_fitted:
        landed = np.maximum(landed, busy_until_s - now_s + transfer)
    # Sequences end while the prompt is computed and handed off.
    wait = np.maximum(decode.wait - landed, 0.0)
    terms = np.zeros((len(TERMS), *shape))
    queue, prefill_time, handoff, waits, step, _, first_token, cost, missed = terms
    queue[:], prefill_time[:], first_token[:] = prompt.queue[:, None], time, ready
    handoff[:], waits[:], step[:] = landed - ready, wait, decode.step
    missed[:] = decode.missed
    cost[:] = landed + wait + decode.step
    rank = cost + MISSED_WEIGHT * missed + prompt.tie[:, None] + decode.tie
    return Ways(
        computes=np.repeat(prompt.rows, shape[1]),
        decodes=np.tile(decode.rows, shape[0]),
        terms=terms.reshape(len(TERMS), -1),
        link_until=landed.ravel(),
        rank=rank.ravel(),
    )


def local_ways(fleet: Fleet, laws: Laws, decode: DecodeSide, now_s: float) -> Ways:
    """Returns the ways on which a decode worker computes what it has not cached by itself."""
    terms = np.zeros((len(TERMS), len(decode.rows)))
    queue, prefill_time, _, waits, step, stall, first_token, cost, missed = terms
    step[:], missed[:] = decode.step, decode.missed
    cost[:] = decode.step
    if laws.is_fitted:
        uncached = np.maximum(decode.uncached, 1.0)
        queue[:] = queue_cost(fleet, laws, decode.rows, now_s)
        prefill_time[:] = prefill_cost(laws, decode.rows, uncached, decode.cached)
        # Each chunk shares its step with those that decode, and holds all of them up.
        num_steps = np.ceil(uncached / fleet.chunk_tokens[decode.rows])
        prefill_time += num_steps * decode.step
        stall[:] = prefill_time * decode.seqs / (decode.seqs + 1.0)
        waits[:] = np.maximum(decode.wait - queue, 0.0)
        first_token[:] = queue + waits + prefill_time
        cost += first_token + stall
    return Ways(
        computes=decode.rows,
        decodes=decode.rows,
        terms=terms,
        link_until=np.zeros(len(decode.rows)),
        rank=cost + MISSED_WEIGHT * missed + decode.tie,
    )


def join_ways(parts: Sequence[Ways]) -> Ways:
    """Returns several lists of ways as one."""
    if len(parts) == 1:
        return parts[0]
    return Ways(
        computes=np.concatenate([part.computes for part in parts]),
        decodes=np.concatenate([part.decodes for part in parts]),
        terms=np.concatenate([part.terms for part in parts], axis=1),
        link_until=np.concatenate([part.link_until for part in parts]),
        rank=np.concatenate([part.rank for part in parts]),
    )
