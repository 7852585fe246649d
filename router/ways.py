"""What each way of a request would cost: both sides' own terms, then pairs of the best of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from router.candidates import COST, FIRST_TOKEN, MISSED, TERMS
from router.cost import Laws
from router.fleet import Fleet, FloatArray, IntArray

SHORT_LIST = 8
"""So many of each side are looked at jointly, and so many ways are kept to explain the choice."""
MISSED_WEIGHT = 1e9
"""Puts a missed time per token above any cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSide:
    """Who may compute the prompt; arrays of one entry a row."""

    own: FloatArray
    """What they are shortened by; infinite where a worker is not to be had."""
    queue: FloatArray
    time: FloatArray
    """Of computing the prompt."""
    uncached: FloatArray
    tie: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSide:
    """Who may decode; arrays of one entry a row."""

    own: FloatArray
    """What they are shortened by; infinite where a worker is not to be had."""
    uncached: FloatArray
    seqs: FloatArray
    """That decode there now."""
    step: FloatArray
    wait: FloatArray
    missed: FloatArray
    """By how much the wanted time per token is missed."""
    tie: FloatArray


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


def shorten(own: FloatArray) -> IntArray:
    """Returns the rows of the best few of a side; none that is not to be had."""
    if len(own) > SHORT_LIST:
        rows = np.argpartition(own, SHORT_LIST)[:SHORT_LIST]
        rows.sort()
    else:
        rows = np.arange(len(own))
    best: IntArray = rows[own[rows] < np.inf]
    return best


def pair_ways(
    fleet: Fleet, laws: Laws, prompt: PromptSide, decode: DecodeSide, now_s: float
) -> Ways:
    """Returns the pairs of the best of two sides: prefill there, decode here."""
    near, far = shorten(prompt.own), shorten(decode.own)
    fixed, per_byte = laws.transfer[:, near, None]
    transfer = fixed + per_byte * (decode.uncached[far] * fleet.kv_bytes_per_token[far])
    queue, time = prompt.queue[near, None], prompt.time[near, None]
    num_chunks = np.ceil(prompt.uncached[near, None] / fleet.chunk_tokens[near, None])
    # All chunks but the last travel while later ones are computed.
    hidden = time * (1.0 - 1.0 / num_chunks)
    ready = queue + time
    landed = ready + np.maximum(transfer - hidden, transfer / num_chunks)
    if laws.is_fitted:
        until_s = fleet.link_until_s
        busy_s = np.maximum(until_s[near, None], until_s[far]) - now_s
        np.maximum(landed, busy_s + transfer, out=landed)
    # Sequences end while the prompt is computed and handed off.
    wait = np.maximum(decode.wait[far] - landed, 0.0)
    step, missed = decode.step[far], decode.missed[far]
    terms = np.zeros((len(TERMS), len(near), len(far)))
    cost = landed + wait + step
    for number, values in enumerate((queue, time, landed - ready, wait, step)):
        terms[number] = values
    terms[FIRST_TOKEN], terms[COST], terms[MISSED] = ready, cost, missed
    rank = cost + (prompt.tie[near, None] + (MISSED_WEIGHT * missed + decode.tie[far]))
    return Ways(
        computes=near.repeat(len(far)),
        decodes=far[None].repeat(len(near), axis=0).ravel(),
        terms=terms.reshape(len(TERMS), -1),
        link_until=landed.ravel(),
        rank=rank.ravel(),
    )


def local_ways(
    fleet: Fleet, laws: Laws, decode: DecodeSide, queue: FloatArray, num_tokens: int
) -> Ways:
    """Returns the ways on which a decode worker computes what it has not cached by itself."""
    rows = shorten(decode.own)
    step, missed, seqs = decode.step[rows], decode.missed[rows], decode.seqs[rows]
    terms = np.zeros((len(TERMS), len(rows)))
    cost = step
    if laws.is_fitted:
        uncached = np.maximum(decode.uncached[rows], 1.0)
        queued = queue[rows]
        fixed, per_token, per_pair = laws.prefill[:, rows]
        context = num_tokens - 0.5 * uncached
        # Each chunk shares its step with those that decode, and holds all of them up.
        num_steps = np.ceil(uncached / fleet.chunk_tokens[rows])
        time = fixed + uncached * (per_token + per_pair * context) + num_steps * step
        stall = time * (seqs / (seqs + 1.0))
        wait = np.maximum(decode.wait[rows] - queued, 0.0)
        first = queued + wait + time
        cost = first + stall + step
        terms[:2], terms[FIRST_TOKEN] = (queued, time), first
        terms[3], terms[5] = wait, stall
    terms[4], terms[COST], terms[MISSED] = step, cost, missed
    return Ways(
        computes=rows,
        decodes=rows,
        terms=terms,
        link_until=np.zeros(len(rows)),
        rank=cost + MISSED_WEIGHT * missed + decode.tie[rows],
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
