"""What each way of a request would cost: pairs of the best of two sides, and one worker for both.

Some twenty workers are too few for arrays: plain numbers take a third of the time.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from router.cost import prefill_cost
from router.fleet import FloatArray, IntArray
from router.scores import Ask, Standing

SHORT_LIST = 8
"""So many of each side are looked at jointly, and so many ways are kept to explain the choice."""
LOCAL_LIST = 4
"""So many of those that could do all by themselves are looked at."""
MISSED_WEIGHT = 1e9
"""Puts a missed time per token above any cost."""


class Sender(NamedTuple):
    """Who may compute the prompt."""

    row: int
    queue: float
    time: float
    """Of computing the prompt."""
    stall: float
    """What others lose that wait while all workers are busy."""
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
    life: float
    """Steps until the last token."""
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


Near = list[tuple[float, Standing, float]]
"""Senders: least cost of each, itself, and the tokens that it has cached."""
Sides = tuple[Near, list[Receiver]]


def shorten(own: FloatArray, size: int = SHORT_LIST) -> IntArray:
    """Returns where the least few of some costs are; none that is infinite."""
    rows: IntArray
    if len(own) <= size:
        rows = np.arange(len(own))
    else:
        rows = own.argpartition(size)[:size]
        rows.sort()
    least = own[rows]
    return rows if math.inf not in least.tolist() else rows[least < np.inf]


def make_sender(ask: Ask, one: Standing, cached: float) -> Sender:
    """Returns what a worker that has some tokens cached would take for the prompt."""
    queue, uncached = one.queue(ask.now_s), ask.num_tokens - cached
    if uncached < 1.0:
        uncached = 1.0
    time = prefill_cost(one.prefill, uncached, cached)
    late = queue + time - ask.ttft_slo_s
    return Sender(
        one.row,
        queue,
        time,
        time * ask.crowding,
        math.ceil(uncached / one.chunk_tokens) or 1,
        one.tie + MISSED_WEIGHT * late if late > 0 else one.tie,
        one.transfer_fixed,
        one.transfer_per_byte,
        one.link_until_s,
    )


def make_receiver(ask: Ask, one: Standing, cached: float) -> Receiver:
    """Returns what decoding would be like at a worker that has some tokens cached."""
    uncached, is_fitted = ask.num_tokens - cached, ask.is_fitted
    added = ask.kv_tokens if is_fitted else uncached
    step = one.step + one.per_sequence * ask.num_samples + one.per_kv_token * added
    life, wait, missed = step, 0.0, 0.0
    if is_fitted:
        if ask.life_tokens > 1:
            life = step * ask.life_tokens
        # Those that decode end one after another over the time that one of them stays.
        wait = life * one.share_to_free(ask.num_samples, added)
        if step > ask.tpot_slo_s:
            missed = step - ask.tpot_slo_s
    return Receiver(
        one.row,
        uncached * one.kv_bytes_per_token,
        step,
        life,
        wait,
        missed,
        one.tie + MISSED_WEIGHT * missed,
        one.link_until_s,
    )


def landing(ask: Ask, sender: Sender, receiver: Receiver) -> float:
    """Returns when the hand-off will be through, from now."""
    transfer = sender.fixed + sender.per_byte * receiver.num_bytes
    # All chunks but the last travel while later ones are computed.
    last = transfer / sender.num_chunks
    seen = transfer - (sender.time - sender.time / sender.num_chunks)
    landed = sender.queue + sender.time + (seen if seen > last else last)
    if ask.is_fitted:
        link_s, other_link_s = sender.link_until_s, receiver.link_until_s
        busy = (link_s if link_s > other_link_s else other_link_s) - ask.now_s + transfer
        if busy > landed:
            return busy
    return landed


def pair_way(ask: Ask, sender: Sender, receiver: Receiver) -> Way:
    """Returns the way of prefill there, decode here."""
    ready, landed = sender.queue + sender.time, landing(ask, sender, receiver)
    # Sequences end while the prompt is computed and handed off.
    left = max(receiver.wait - landed, 0.0)
    cost = landed + left + receiver.life + sender.stall
    terms = (
        sender.queue,
        sender.time,
        landed - ready,
        left,
        receiver.step,
        sender.stall,
        ready,
        cost,
        receiver.missed,
    )
    transfer = sender.fixed + sender.per_byte * receiver.num_bytes
    rank = cost + sender.extra + receiver.extra
    return Way(rank, sender.row, receiver.row, transfer, terms)


def best_pair(ask: Ask, near: Near, far: list[Receiver]) -> Way | None:
    """Returns the best pair of two sides; None if one of them is empty."""
    if not near or not far:
        return None
    best: tuple[Sender, Receiver] | None = None
    least_rank = math.inf
    floors = [one.life + one.extra for one in far]
    least, least_bytes = min(floors), min([one.num_bytes for one in far])
    for own, one, cached in sorted(near, key=_own_cost):
        num_chunks = math.ceil((ask.num_tokens - cached) / one.chunk_tokens) or 1
        last = (one.transfer_fixed + one.transfer_per_byte * least_bytes) / num_chunks
        if own + last + least >= least_rank:
            # The last chunk cannot be hidden, and nobody decodes more quickly.
            continue
        sender = make_sender(ask, one, cached)
        base = sender.stall + sender.extra
        for receiver, floor in zip(far, floors, strict=True):
            if own + last + floor >= least_rank:
                continue
            landed, wait = landing(ask, sender, receiver), receiver.wait
            rank = (wait if wait > landed else landed) + base + floor
            if rank < least_rank:
                least_rank, best = rank, (sender, receiver)
    assert best is not None
    return pair_way(ask, *best)


def all_pairs(ask: Ask, near: Near, far: list[Receiver]) -> Iterator[Way]:
    """Yields all pairs of two sides."""
    for _, standing, cached in near:
        sender = make_sender(ask, standing, cached)
        for receiver in far:
            yield pair_way(ask, sender, receiver)


def local_way(ask: Ask, one: Standing, receiver: Receiver, cached: float) -> Way:
    """Returns the way on which a decode worker computes what it has not cached by itself."""
    step, wait, life = receiver.step, receiver.wait, receiver.life
    queue = time = stall = left = first = 0.0
    if ask.is_fitted:
        queue, uncached = one.queue(ask.now_s), max(ask.num_tokens - cached, 1.0)
        # Each chunk shares its step with those that decode, and holds all of them up.
        time = prefill_cost(one.prefill, uncached, cached)
        time += math.ceil(uncached / one.chunk_tokens) * step
        stall = time * (one.seqs / (one.seqs + 1.0) + ask.crowding)
        left = wait - queue if wait > queue else 0.0
        first = queue + left + time
    cost = first + stall + life
    late = MISSED_WEIGHT * (first - ask.ttft_slo_s) if first > ask.ttft_slo_s else 0.0
    terms = (queue, time, 0.0, left, step, stall, first, cost, receiver.missed)
    return Way(cost + receiver.extra + late, one.row, one.row, 0.0, terms)


def _own_cost(sender: tuple[float, Standing, float]) -> float:
    return sender[0]
