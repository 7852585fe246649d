"""Steps of a decode worker that can be booked many at a time, since nothing happens in between.

While no prompt is computed here, every step takes each running sequence on by one token. Until the
first of them reaches its `max_tokens`, or blocks run short, the steps differ by lengths alone. A
simulator books them at once; what is held, cached and evicted afterwards is what step after step
would have left.
"""

from collections.abc import Callable, Sequence

from decode_worker.admission import StepPace
from decode_worker.occupancy import Occupancy
from pdserve.config.engine import EngineConfig
from pdserve.engine.scheduler import SequenceState, num_blocks_for
from pdserve.request import Request

TokenMaker = Callable[[Request], int]
"""Names the token that a request goes on with; never one that stops it."""


class StepSkipper:
    """Books steps of one decode scheduler. Engine thread only."""

    def __init__(
        self, config: EngineConfig, occupancy: Occupancy, pace: StepPace, num_stages: int
    ) -> None:
        """Works on the scheduler's own parts; a pipeline of several stages skips nothing."""
        self._config = config
        self._occupancy = occupancy
        self._pace = pace
        self._num_stages = num_stages

    @property
    def num_running(self) -> int:
        """Sequences that make one token a step."""
        return len(self._occupancy.running)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV the next step reads for them, those it writes included."""
        return sum(sequence.num_planned + 1 for sequence in self._occupancy.running)

    def next_event_horizon(self) -> int:
        """Returns how many steps can be booked at once; 0: the next one must be planned.

        In the last of them a sequence may end.
        """
        occupancy, size = self._occupancy, self._config.block_size
        running = occupancy.running
        is_busy = bool(occupancy.flights) or bool(occupancy.computing) or len(occupancy.lanes) > 0
        num_seats = max(1, min(self._config.max_num_seqs, self._config.max_num_batched_tokens))
        if is_busy or self._num_stages > 1 or not running or len(running) > num_seats:
            return 0
        if any(_shares_next_block(occupancy, sequence, size) for sequence in running):
            return 0
        num_available = occupancy.cache.pool.num_available
        most = min(_num_remaining(sequence) for sequence in running)
        if _num_new_blocks(running, most, size) <= num_available:
            return most
        least = 0
        while most - least > 1:
            middle = (least + most) // 2
            if _num_new_blocks(running, middle, size) <= num_available:
                least = middle
            else:
                most = middle
        return least

    def skip_steps(
        self, num_steps: int, step_s: float, make_token: TokenMaker
    ) -> tuple[Request, ...]:
        """Books steps as planning and completing each of them would, and names what ended.

        Args:
            num_steps: at most `next_event_horizon`.
            step_s: their mean time.
            make_token: names the token that a request goes on with; never one that stops it.
        """
        occupancy, size = self._occupancy, self._config.block_size
        self._pace.note_steps(num_steps, step_s)
        running = tuple(occupancy.running)
        for sequence in running:
            num_tokens = sequence.num_computed + num_steps
            occupancy.cache.grow(sequence.table, num_blocks_for(num_tokens, size))
        ended = []
        for sequence in running:
            has_ended = _num_remaining(sequence) == num_steps
            token = make_token(sequence.request)
            sequence.chain.append_copies(token, num_steps - has_ended)
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
