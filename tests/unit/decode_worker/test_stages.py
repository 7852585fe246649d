"""All stages of a pipeline are at work, as far as there is work for them."""

from itertools import pairwise

import pytest

from decode_worker.scheduler import DecodeScheduler
from pdserve.engine.batch import StepPlan, lookahead_of
from pdserve.engine.pipeline import StepPipeline
from pdserve.request import Request, RequestId
from pdserve.timeline import ManualClock
from tests.support.scheduling import make_config, make_request
from tests.support.staged_time import TimetableRunner

NUM_TOKENS = 41
PIPELINES = [(2, False), (2, True), (3, False), (3, True), (4, True)]


class StageBench:
    """A decode worker of several stages; KV of prompts is there at once."""

    def __init__(self, num_stages: int, *, feeds_tokens: bool, budget: int = 640) -> None:
        self.runner = TimetableRunner(num_stages, feeds_tokens)
        self.scheduler = DecodeScheduler(
            make_config(max_num_seqs=64, max_num_batched_tokens=budget),
            1000,
            "revision",
            ManualClock(),
            max_waiting=64,
            max_local_prefill_tokens=None,
            lookahead=lookahead_of(self.runner, num_stages),
        )
        self.pipeline = StepPipeline(self.runner, self.scheduler.plan_step)

    def start(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.reserve(request)
            self.scheduler.start(request.request_id, 1, {0: 7})

    def turn(self) -> bool:
        ended = self.pipeline.turn()
        if ended is not None:
            self.scheduler.complete_step(ended.plan, ended.result)
        self.scheduler.check()
        return ended is not None

    def run(self) -> None:
        while self.turn():
            pass
        assert self.scheduler.ledger().sequences == 0


def requests_of(count: int, max_tokens: int = NUM_TOKENS) -> list[Request]:
    return [make_request(f"r{index}", 4, max_tokens=max_tokens) for index in range(count)]


def names(plan: StepPlan) -> set[RequestId]:
    return {part.request.request_id for part in plan.slices}


@pytest.mark.parametrize(("num_stages", "feeds_tokens"), PIPELINES)
def test_a_batch_keeps_every_stage_at_work(num_stages: int, feeds_tokens: bool):
    bench = StageBench(num_stages, feeds_tokens=feeds_tokens)
    bench.start(*requests_of(12))
    bench.run()
    # But for filling it once and draining it once.
    num_idle = num_stages - 1
    for busy in bench.runner.busy:
        assert bench.runner.now - busy == pytest.approx(num_idle)


@pytest.mark.parametrize(("num_stages", "feeds_tokens"), PIPELINES)
def test_a_lone_sequence_waits_for_nothing_but_the_stages(num_stages: int, feeds_tokens: bool):
    bench = StageBench(num_stages, feeds_tokens=feeds_tokens)
    bench.start(*requests_of(1))
    bench.run()
    assert bench.runner.now == (NUM_TOKENS - 1) * num_stages


def test_steps_in_flight_have_no_sequence_in_common_where_tokens_are_not_fed():
    bench = StageBench(3, feeds_tokens=False)
    bench.start(*requests_of(10))
    while bench.turn():
        flying = [names(step.plan) for step in bench.runner.flying]
        assert sum(map(len, flying)) == len(set().union(*flying))


@pytest.mark.parametrize("feeds_tokens", [False, True])
def test_lanes_stay_even_when_sequences_of_one_of_them_end(feeds_tokens: bool):
    bench = StageBench(2, feeds_tokens=feeds_tokens)
    requests = requests_of(12)
    bench.start(*requests)
    bench.turn()
    in_lane = names(bench.runner.plans[0])
    for request_id in list(in_lane)[:4]:
        bench.scheduler.cancel(request_id)
    for _ in range(12):
        bench.turn()
    sizes = {len(plan.slices) for plan in bench.runner.plans[-4:]}
    assert sizes == {4}


def test_newcomers_are_spread_over_the_lanes():
    bench = StageBench(2, feeds_tokens=True)
    bench.start(*requests_of(4))
    for _ in range(4):
        bench.turn()
    bench.start(*(make_request(f"late{index}", 4, max_tokens=NUM_TOKENS) for index in range(4)))
    for _ in range(8):
        bench.turn()
    assert [len(plan.slices) for plan in bench.runner.plans[-4:]] == [4, 4, 4, 4]


@pytest.mark.parametrize("feeds_tokens", [False, True])
def test_chunks_of_one_prompt_follow_each_other_through_the_stages(feeds_tokens: bool):
    bench = StageBench(2, feeds_tokens=feeds_tokens, budget=2048)
    bench.scheduler.submit_local(make_request("a", 2048, max_tokens=1))
    bench.run()
    ranges = [(part.start, part.end) for plan in bench.runner.plans for part in plan.slices]
    assert len(ranges) >= 4
    assert all(end == start for (_, end), (start, _) in pairwise(ranges))
    assert bench.runner.now < 0.7 * sum(bench.runner.busy)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_B9_blocks_of_a_cancelled_sequence_are_back_within_two_rounds(num_stages: int):
    bench = StageBench(num_stages, feeds_tokens=True)
    requests = requests_of(2 * num_stages)
    bench.start(*requests)
    for _ in range(3 * num_stages):
        bench.turn()
    flights = bench.scheduler._occupancy.flights
    for request in requests:
        # Whichever step of which stage it is in.
        bench.scheduler.cancel(request.request_id)
        assert flights.num_held_tables == 1
        for _ in range(2 * num_stages):
            bench.turn()
        assert flights.num_held_tables == 0
        assert all(request.request_id not in names(step.plan) for step in bench.runner.flying)
