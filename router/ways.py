"""What each way of a request would cost: both sides' own terms, then pairs of the best of them."""

import math
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

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


@dataclass(frozen=True, slots=True)
class Way:
    """One way of a request."""

    rank: float
    """What it is picked by."""
    computes: int
    """Row of the worker that computes the prompt."""
    decodes: int
    """Row of the one that decodes; the same for the local path."""
    transfer: float
    """How long the hand-off takes both links."""
    terms: tuple[float, ...]
    """In the order of TERMS."""


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
    fleet: Fleet,
    laws: Laws,
    prompt: PromptSide,
    decode: DecodeSide,
    now_s: float,
    ttft_slo_s: float = math.inf,
) -> list[Way]:
    """Returns the best pairs of the best of two sides: prefill there, decode here."""
    near, far = shorten(prompt.own), shorten(decode.own)
    # Sixteen workers are too few for arrays: plain numbers take a third of the time.
    receivers = list(
        zip(
            far.tolist(),
            (decode.uncached[far] * fleet.kv_bytes_per_token[far]).tolist(),
            decode.step[far].tolist(),
            decode.wait[far].tolist(),
            decode.missed[far].tolist(),
            decode.tie[far].tolist(),
            (fleet.link_until_s[far] - now_s).tolist(),
            strict=True,
        )
    )
    fixed, per_byte = laws.transfer[:, near].tolist()
    senders = zip(
        near.tolist(),
        prompt.queue[near].tolist(),
        prompt.time[near].tolist(),
        np.ceil(prompt.uncached[near] / fleet.chunk_tokens[near]).tolist(),
        prompt.tie[near].tolist(),
        (fleet.link_until_s[near] - now_s).tolist(),
        fixed,
        per_byte,
        strict=True,
    )
    ways = []
    for sender in senders:
        _, queue, time, num_chunks, tie, busy_s, fixed_s, byte_s = sender
        ready = queue + time
        # All chunks but the last travel while later ones are computed.
        hidden = time - time / num_chunks
        base = tie + MISSED_WEIGHT * max(ready - ttft_slo_s, 0.0)
        for receiver in receivers:
            _, num_bytes, step, wait, missed, other_tie, other_busy_s = receiver
            transfer = fixed_s + byte_s * num_bytes
            landed = ready + max(transfer - hidden, transfer / num_chunks)
            if laws.is_fitted:
                landed = max(landed, max(busy_s, other_busy_s) + transfer)
            # Sequences end while the prompt is computed and handed off.
            cost = max(wait, landed) + step
            rank = cost + base + (MISSED_WEIGHT * missed + other_tie)
            ways.append((rank, landed, cost, sender, receiver, transfer))
    ways.sort(key=itemgetter(0))
    found = []
    for rank, landed, cost, sender, receiver, transfer in ways[:SHORT_LIST]:
        row, queue, time, *_ = sender
        other, _, step, wait, missed, *_ = receiver
        ready = queue + time
        left = max(wait - landed, 0.0)
        terms = (queue, time, landed - ready, left, step, 0.0, ready, cost, missed)
        found.append(Way(rank, row, other, transfer, terms))
    return found


def local_ways(
    fleet: Fleet,
    laws: Laws,
    decode: DecodeSide,
    queue: FloatArray,
    num_tokens: int,
    ttft_slo_s: float = math.inf,
) -> list[Way]:
    """Returns the ways on which a decode worker computes what it has not cached by itself."""
    rows = shorten(decode.own)
    workers = zip(
        rows.tolist(),
        queue[rows].tolist(),
        np.maximum(decode.uncached[rows], 1.0).tolist(),
        fleet.chunk_tokens[rows].tolist(),
        decode.seqs[rows].tolist(),
        decode.step[rows].tolist(),
        decode.wait[rows].tolist(),
        decode.missed[rows].tolist(),
        decode.tie[rows].tolist(),
        *laws.prefill[:, rows].tolist(),
        strict=True,
    )
    ways = []
    for row, queued, uncached, chunk, seqs, step, wait, missed, tie, *law in workers:
        time = stall = left = first = 0.0
        if laws.is_fitted:
            fixed, per_token, per_pair = law
            time = fixed + uncached * (per_token + per_pair * (num_tokens - uncached / 2))
            # Each chunk shares its step with those that decode, and holds all of them up.
            time += math.ceil(uncached / chunk) * step
            stall = time * seqs / (seqs + 1.0)
            left = max(wait - queued, 0.0)
            first = queued + left + time
        cost = first + stall + step
        rank = cost + tie + MISSED_WEIGHT * (missed + max(first - ttft_slo_s, 0.0))
        shown = queued if laws.is_fitted else 0.0
        terms = (shown, time, 0.0, left, step, stall, first, cost, missed)
        ways.append(Way(rank, row, row, 0.0, terms))
    return ways
