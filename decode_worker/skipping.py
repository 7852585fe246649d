"""Steps of a decode worker that can be booked many at a time, since nothing happens in between.

While no prompt is computed here, every step takes each running sequence on by one token. Until the
first of them reaches its `max_tokens`, or blocks run short, the steps differ by lengths alone. A
simulator books them at once; what is held, cached and evicted afterwards is what step after step
would have left.
"""

from collections.abc import Callable, Sequence

from decode_worker.occupancy import Occupancy
from pdserve.config.engine import EngineConfig
from pdserve.engine.scheduler import SequenceState, num_blocks_for
from pdserve.request import Request

TokenMaker = Callable[[Request], int]
"""Names the token that a request goes on with; never one that stops it."""


def count_uneventful_steps(occupancy: Occupancy, config: EngineConfig) -> int:
    """Returns how many steps can be booked at once; 0: the next one must be planned.

    In the last of them a sequence may end.
    """
    running = occupancy.running
    is_busy = bool(occupancy.flights) or bool(occupancy.computing) or len(occupancy.lanes) > 0
    num_seats = max(1, min(config.max_num_seqs, config.max_num_batched_tokens))
    if is_busy or not running or len(running) > num_seats:
        return 0
    if any(_shares_next_block(occupancy, sequence, config.block_size) for sequence in running):
        return 0
    num_available = occupancy.cache.pool.num_available
    most = min(_num_remaining(sequence) for sequence in running)
    if _num_new_blocks(running, most, config.block_size) <= num_available:
        return most
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        if _num_new_blocks(running, middle, config.block_size) <= num_available:
            least = middle
        else:
            most = middle
    return least


def book_steps(
    occupancy: Occupancy, block_size: int, num_steps: int, make_token: TokenMaker
) -> tuple[Request, ...]:
    """Books so many steps, no more than `count_uneventful_steps` allows, and names what ended."""
    running = tuple(occupancy.running)
    for sequence in running:
        num_tokens = sequence.num_computed + num_steps
        occupancy.cache.grow(sequence.table, num_blocks_for(num_tokens, block_size))
    ended = []
    for sequence in running:
        has_ended = _num_remaining(sequence) == num_steps
        num_known = num_steps - has_ended
        sequence.chain.append_copies(make_token(sequence.request), num_known)
        sequence.num_computed += num_steps
        occupancy.cache.enter(sequence.table, sequence.chain, sequence.num_computed)
        if has_ended:
            occupancy.drop(sequence)
            ended.append(sequence.request)
    occupancy.counters.generation_tokens += num_steps * len(running)
    return tuple(ended)


def _num_remaining(sequence: SequenceState) -> int:
    return sequence.request.sampling.max_tokens - sequence.num_output_tokens


def _shares_next_block(occupancy: Occupancy, sequence: SequenceState, block_size: int) -> bool:
    index = sequence.num_computed // block_size
    blocks = sequence.table.block_ids
    return index < len(blocks) and occupancy.cache.pool.is_shared(blocks[index])


def _num_new_blocks(running: Sequence[SequenceState], num_steps: int, block_size: int) -> int:
    return sum(
        max(
            0,
            num_blocks_for(one.num_computed + num_steps, block_size) - len(one.table.block_ids),
        )
        for one in running
    )
