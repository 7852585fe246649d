"""What each way of a request would cost: pairs of the best of two sides, and one worker for both.

Some twenty workers are too few for arrays: plain numbers take a third of the time.
"""

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from router.cost import prefill_cost, stall_of
from router.fleet import FloatArray, IntArray
from router.scores import Standing

SHORT_LIST = 8
"""So many of each side are looked at jointly, and so many ways are kept to explain the choice."""
MISSED_WEIGHT = 1e9
"""Puts a missed time per token above any cost."""


class Sender(NamedTuple):
    """Who may compute the prompt."""

    row: int
    queue: float
    time: float
    """Of computing the prompt."""
    stall: float
    """What those lose that come behind it."""
    num_chunks: float
    extra: float
    """What counts besides the cost."""
    fixed: float
    per_byte: float
    link_until_s: float


class Receiver(NamedTuple):
    """Who may decode."""

    row: int
    num_bytes: float
    """To be handed off."""
    step: float
    wait: float
    missed: float
    """By how much the wanted time per token is missed."""
    extra: float
    """What counts besides the cost."""
    link_until_s: float


class Way(NamedTuple):
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
    """Returns where the least few of some costs are; none that is infinite."""
    if len(own) > SHORT_LIST:
        rows = own.argpartition(SHORT_LIST)[:SHORT_LIST]
        rows.sort()
    else:
        rows = np.arange(len(own))
    best: IntArray = rows[own[rows] < np.inf]
    return best


def best_ways(ways: Iterable[Way]) -> list[Way]:
    """Returns the best few, the best one first."""
    return sorted(ways, key=attrgetter("rank"))[:SHORT_LIST]


def pair_ways(
    near: list[Sender], far: list[Receiver], now_s: float, *, is_fitted: bool
) -> list[Way]:
    """Returns the best pairs of two sides: prefill there, decode here."""
    pairs = []
    for number, sender in enumerate(near):
        _, queue, time, stall, num_chunks, extra, fixed, per_byte, link_s = sender
        ready = queue + time
        # All chunks but the last travel while later ones are computed.
        share = 1.0 / num_chunks
        hidden = time - time * share
        base = extra + stall
        for other, (_, num_bytes, step, wait, _, more, other_link_s) in enumerate(far):
            transfer = fixed + per_byte * num_bytes
            # Conditions instead of `max`, which takes longer than all the rest.
            seen, last = transfer - hidden, transfer * share
            landed = ready + (seen if seen > last else last)
            if is_fitted:
                busy = (link_s if link_s > other_link_s else other_link_s) - now_s + transfer
                if busy > landed:
                    landed = busy
            # Sequences end while the prompt is computed and handed off.
            begin = wait if wait > landed else landed
            pairs.append((begin + step + base + more, number, other, landed, transfer))
    pairs.sort()
    return [
        _pair(rank, near[number], far[other], landed, transfer)
        for rank, number, other, landed, transfer in pairs[:SHORT_LIST]
    ]


def _pair(rank: float, sender: Sender, receiver: Receiver, landed: float, transfer: float) -> Way:
    ready = sender.queue + sender.time
    left = max(receiver.wait - landed, 0.0)
    terms = (
        sender.queue,
        sender.time,
        landed - ready,
        left,
        receiver.step,
        sender.stall,
        ready,
        landed + left + receiver.step + sender.stall,
        receiver.missed,
    )
    return Way(rank, sender.row, receiver.row, transfer, terms)


def local_way(
    one: Standing,
    receiver: Receiver,
    queue: float,
    prompt: tuple[float, float],
    rate: float,
    ttft_slo_s: float,
    *,
    is_fitted: bool,
) -> Way:
    """Returns the way on which a decode worker computes what it has not cached by itself.

    Args:
        one: the worker.
        receiver: the same, as it decodes.
        queue: before the prompt.
        prompt: its uncached tokens, and those that are cached.
        rate: of prompts that come behind it.
        ttft_slo_s: the wanted time to the first token.
        is_fitted: costs are seconds.
    """
    step, wait = receiver.step, receiver.wait
    time = stall = left = first = 0.0
    if is_fitted:
        uncached, cached = prompt
        # Each chunk shares its step with those that decode, and holds all of them up.
        time = prefill_cost(one.prefill, uncached, cached)
        time += math.ceil(uncached / one.chunk_tokens) * step
        stall = time * one.seqs / (one.seqs + 1.0) + stall_of(time, queue, rate)
        left = max(wait - queue, 0.0)
        first = queue + left + time
    cost = first + stall + step
    late = max(first - ttft_slo_s, 0.0)
    shown = queue if is_fitted else 0.0
    terms = (shown, time, 0.0, left, step, stall, first, cost, receiver.missed)
    return Way(cost + receiver.extra + MISSED_WEIGHT * late, one.row, one.row, 0.0, terms)
