import random

import pytest

from decode_worker.admission import Grant
from decode_worker.scheduler import DecodeScheduler
from pdserve.engine.batch import Lookahead, StepResult
from pdserve.request import Request, RequestId, SampledToken
from pdserve.timeline import ManualClock
from tests.support.scheduling import make_config, make_request

BLOCK_SIZE = 4


def token_of(request: Request) -> int:
    return 7 + sum(request.request_id.encode())


def make_scheduler(num_blocks: int = 40, *, num_stages: int = 1) -> DecodeScheduler:
    return DecodeScheduler(
        make_config(block_size=BLOCK_SIZE, max_num_seqs=6),
        num_blocks,
        "revision",
        ManualClock(),
        max_waiting=8,
        max_local_prefill_tokens=None,
        lookahead=Lookahead(num_stages=num_stages),
    )


def land(scheduler: DecodeScheduler, request: Request) -> bool:
    if not isinstance(scheduler.reserve(request), Grant):
        return False
    scheduler.start(request.request_id, request.attempt, {0: token_of(request)})
    return True


def step(scheduler: DecodeScheduler) -> list[str]:
    """Plans and completes one step; names what ended or was let go."""
    plan = scheduler.plan_step()
    gone = [
        f"{one.request.request_id} let go at {one.next_index}" for one in scheduler.take_let_go()
    ]
    if plan is None:
        return gone
    sampled = {
        part.request.request_id: SampledToken(token_id=token_of(part.request))
        for part in plan.slices
    }
    progress = scheduler.complete_step(plan, StepResult(sampled=sampled))
    return [*gone, *(one.request_id for one in progress if one.finish_reason is not None)]


def run_stepwise(scheduler: DecodeScheduler, num_steps: int) -> list[tuple[int, str]]:
    return [(number, one) for number in range(num_steps) for one in step(scheduler)]


def run_skipping(scheduler: DecodeScheduler, num_steps: int) -> list[tuple[int, str]]:
    seen: list[tuple[int, str]] = []
    number = 0
    while number < num_steps:
        count = min(scheduler.skipper.next_event_horizon(), num_steps - number)
        if not count:
            seen += [(number, one) for one in step(scheduler)]
            number += 1
            continue
        ended = scheduler.skipper.skip_steps(count, 0.01, token_of)
        number += count
        seen += [(number - 1, request.request_id) for request in ended]
        scheduler.check()
    return seen


def state_of(scheduler: DecodeScheduler) -> object:
    probes = [make_request(str(i), prompt_of(i)) for i in range(30)]
    occupancy = scheduler._occupancy
    hits = [len(occupancy.find_for_landing(occupancy.chain(one)).block_ids) for one in probes]
    lengths = [(one.request.request_id, len(one.chain)) for one in occupancy.running]
    return scheduler.load(), scheduler.ledger(), scheduler.counters, hits, lengths


def prompt_of(number: int) -> tuple[int, ...]:
    """Prompts of three families, whose members share their beginnings."""
    return (number % 3,) * 6 + (number,) * (3 + number % 5)


@pytest.mark.parametrize("seed", range(30))
def test_skipped_steps_leave_what_step_after_step_leaves(seed: int):
    numbers = random.Random(seed)
    num_blocks = numbers.choice([14, 20, 40])
    stepwise, skipping = make_scheduler(num_blocks), make_scheduler(num_blocks)
    num_skipped = 0
    for number in range(30):
        request = make_request(
            str(number), prompt_of(numbers.randrange(30)), max_tokens=numbers.randrange(2, 25)
        )
        assert land(stepwise, request) == land(skipping, request)
        num_steps = numbers.randrange(12)
        num_skipped += skipping.skipper.next_event_horizon()
        assert run_stepwise(stepwise, num_steps) == run_skipping(skipping, num_steps)
        assert state_of(stepwise) == state_of(skipping)
    assert num_skipped > 20


def test_the_horizon_ends_with_the_first_sequence_to_end():
    scheduler = make_scheduler()
    land(scheduler, make_request("a", 5, max_tokens=9))
    land(scheduler, make_request("b", 5, max_tokens=4))
    assert scheduler.skipper.next_event_horizon() == 3
    assert [one.request_id for one in scheduler.skipper.skip_steps(3, 0.01, token_of)] == ["b"]
    assert scheduler.skipper.next_event_horizon() == 5


def test_the_horizon_ends_where_blocks_run_short():
    scheduler = make_scheduler(num_blocks=5)
    land(scheduler, make_request("a", 4, max_tokens=12))
    land(scheduler, make_request("b", 4, max_tokens=12))
    # Each has a block to grow into; then one is left for both.
    assert scheduler.skipper.next_event_horizon() == 4
    scheduler.skipper.skip_steps(4, 0.01, token_of)
    assert scheduler.skipper.next_event_horizon() == 0
    assert step(scheduler) == ["b let go at 5"]


def test_nothing_is_skipped_while_a_prompt_waits_or_a_step_flies():
    scheduler = make_scheduler()
    assert scheduler.skipper.next_event_horizon() == 0
    land(scheduler, make_request("a", 5, max_tokens=9))
    scheduler.submit_local(make_request("b", 5, max_tokens=9))
    assert scheduler.skipper.next_event_horizon() == 0
    step(scheduler)
    assert scheduler.skipper.next_event_horizon() == 7
    assert scheduler.plan_step() is not None
    assert scheduler.skipper.next_event_horizon() == 0


def test_a_pipeline_skips_nothing():
    scheduler = make_scheduler(num_stages=2)
    land(scheduler, make_request("a", 5, max_tokens=9))
    assert scheduler.skipper.next_event_horizon() == 0


def test_samples_that_share_a_block_are_planned():
    scheduler = make_scheduler()
    request = make_request("a", 5, max_tokens=9, n=2)
    assert isinstance(scheduler.reserve(request), Grant)
    scheduler.start(RequestId("a"), 1, {0: 7, 1: 7})
    assert scheduler.skipper.next_event_horizon() == 0
    step(scheduler)
    assert scheduler.skipper.next_event_horizon() == 7
