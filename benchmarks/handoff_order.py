"""One measurement of the hand-off benchmark, as both of its ends know it."""

import random
from dataclasses import dataclass

from pdserve.request import BlockId, ReservationId, Role

NUM_BLOCKS = 4096
PAUSE_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Order:
    """One measurement: some hand-offs of prompts of one length, one after another."""

    seed: int
    num_tokens: int
    num_handoffs: int = 1
    computes: bool = False
    """Prompts are computed, each handed off once it is done; else their KV lies there."""
    ships: bool = True
    has_sum: bool = False
    """Tell the sum of all values, to compare both ends; and the memory that is in use."""
    pause_s: float = PAUSE_S
    """Before each, until both GPUs are idle and all slots are granted again."""


def reservation_of(order: Order, index: int) -> ReservationId:
    """Names a hand-off, alike on both ends."""
    return ReservationId(random.Random(f"{order.seed} {index}").randbytes(16))


def table_of(order: Order, index: int, side: Role) -> tuple[BlockId, ...]:
    """Draws the scattered blocks of a prompt; on either end others."""
    numbers = random.Random(f"{order.seed} {index} {side}")
    return tuple(BlockId(one) for one in numbers.sample(range(NUM_BLOCKS), order.num_tokens // 16))
