"""What a decode scheduler does while a step is in flight, one hazard each."""

from dataclasses import replace

import pytest

from pdserve.engine.batch import StepPlan, StepResult
from pdserve.engine.scheduler import Stage
from pdserve.request import Request, RequestId, SampledToken
from tests.support.decode_bench import BLOCK_SIZE, DecodeBench
from tests.support.scheduling import expected_output, make_request


def rid(name: str) -> RequestId:
    return RequestId(name)


def plan_of(bench: DecodeBench) -> StepPlan:
    plan = bench.scheduler.plan_step()
    assert plan is not None
    return plan


def names(plan: StepPlan) -> list[str]:
    return [part.request.request_id for part in plan.slices]


def result_of(plan: StepPlan, token_id: int = 7) -> StepResult:
    """The same token for every sample, as no digest is looked at here."""
    return StepResult(
        sampled={
            one.request_id: SampledToken(token_id=token_id)
            for part in plan.slices
            for one in part.request.samples()
        }
    )


def with_sampling(request: Request, **changes: object) -> Request:
    return replace(request, sampling=replace(request.sampling, **changes))


def num_unheld(bench: DecodeBench) -> int:
    ledger = bench.scheduler.ledger()
    return ledger.free_blocks + ledger.cached_blocks


def test_the_next_step_awaits_the_token_of_the_one_in_flight():
    bench = DecodeBench()
    bench.run_landed(make_request("a", 8))
    (first,) = plan_of(bench).slices
    (second,) = plan_of(bench).slices
    assert not first.awaits_token
    assert second.awaits_token
    assert second.token_ids == ()
    assert (second.start, second.end, second.num_tokens) == (first.end, first.end + 1, 1)
    assert second.output_index == first.output_index + 1
    assert len(second.block_ids) * BLOCK_SIZE >= second.end


def test_an_unchanged_block_table_is_the_very_same_tuple():
    bench = DecodeBench()
    bench.run_landed(make_request("a", 9))
    first, second = plan_of(bench), plan_of(bench)
    assert first.slices[0].block_ids is second.slices[0].block_ids


def test_the_last_token_by_max_tokens_is_not_planned_past():
    bench = DecodeBench()
    bench.run_landed(make_request("a", 8, max_tokens=3))
    plans = [plan_of(bench), plan_of(bench)]
    assert [plan.slices[0].output_index for plan in plans] == [1, 2]
    (entry,) = bench.scheduler.complete_step(plans[0], result_of(plans[0]))
    assert entry.finish_reason is None
    assert bench.scheduler.plan_step() is None
    (entry,) = bench.scheduler.complete_step(plans[1], result_of(plans[1]))
    assert entry.finish_reason == "length"
    bench.assert_idle()


def test_a_stop_token_s_successor_is_neither_told_nor_counted_nor_cached():
    bench = DecodeBench(num_blocks=16)
    # The stop token is the seventh of the second block: its successor would fill that block.
    bench.run_landed(with_sampling(make_request("a", 2 * BLOCK_SIZE - 3), stop_token_ids=(7,)))
    first, second = plan_of(bench), plan_of(bench)
    assert second.slices[0].end == 2 * BLOCK_SIZE - 1
    (entry,) = bench.scheduler.complete_step(first, result_of(first, 8))
    third = plan_of(bench)
    assert third.slices[0].end == 2 * BLOCK_SIZE
    (entry,) = bench.scheduler.complete_step(second, result_of(second, 7))
    assert entry.finish_reason == "stop"
    assert bench.scheduler.stage_of(rid("a")) is None
    assert num_unheld(bench) < 16, "the step in flight still writes into its blocks"
    bench.scheduler.check()
    assert bench.scheduler.complete_step(third, result_of(third)) == ()
    assert bench.scheduler.counters.generation_tokens == 2
    assert bench.scheduler.ledger().cached_blocks == 1
    bench.assert_idle()


@pytest.mark.parametrize("stage", [Stage.COMPUTING, Stage.RUNNING])
def test_A6_blocks_of_a_cancelled_sequence_are_nobody_s_until_its_step_has_ended(stage: Stage):
    bench = DecodeBench(num_blocks=8, max_num_batched_tokens=16)
    request = make_request("a", 24, max_tokens=4)
    if stage is Stage.COMPUTING:
        bench.scheduler.submit_local(request)
    else:
        bench.run_landed(request)
    plan = plan_of(bench)
    assert bench.scheduler.stage_of(rid("a")) is stage
    assert bench.scheduler.cancel(rid("a"))
    bench.scheduler.check()
    bench.refuse(make_request("b", 20))
    assert bench.scheduler.complete_step(plan, result_of(plan)) == ()
    bench.reserve(make_request("b", 20))
    bench.scheduler.cancel(rid("b"))
    bench.assert_idle()


def test_a_newer_attempt_does_not_await_the_token_of_an_older_one():
    bench = DecodeBench()
    bench.run_landed(make_request("a", 8))
    old = plan_of(bench)
    bench.run_landed(make_request("a", 8, attempt=2))
    new = plan_of(bench)
    assert [part.awaits_token for part in new.slices] == [False]
    assert bench.scheduler.complete_step(old, result_of(old)) == ()
    (entry,) = bench.scheduler.complete_step(new, result_of(new))
    assert (entry.attempt, entry.output_index) == (2, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": ((3, 1.0),)},
        {"logprobs": 2},
    ],
)
def test_what_is_chosen_on_the_host_waits_and_the_others_go_on(changes: dict[str, object]):
    bench = DecodeBench()
    bench.run_landed(with_sampling(make_request("host", 8), **changes))
    bench.run_landed(make_request("device", 8))
    plans = [plan_of(bench), plan_of(bench)]
    bench.scheduler.complete_step(plans[0], result_of(plans[0]))
    plans.append(plan_of(bench))
    bench.scheduler.complete_step(plans[1], result_of(plans[1]))
    plans.append(plan_of(bench))
    assert [names(plan) for plan in plans] == [
        ["host", "device"],
        ["device"],
        ["host", "device"],
        ["device"],
    ]
    assert not any(part.awaits_token for plan in plans for part in plan.slices[:-1])


def test_the_log_probability_of_the_chosen_token_alone_makes_nobody_wait():
    bench = DecodeBench()
    bench.run_landed(with_sampling(make_request("a", 8), logprobs=0))
    plan_of(bench)
    assert plan_of(bench).slices[0].awaits_token


def test_the_first_token_of_a_prompt_computed_here_is_awaited_too():
    bench = DecodeBench(max_num_batched_tokens=64)
    bench.scheduler.submit_local(make_request("a", 70))
    plans = [plan_of(bench), plan_of(bench)]
    assert [(part.start, part.end) for plan in plans for part in plan.slices] == [(0, 64), (64, 70)]
    bench.scheduler.complete_step(plans[0], result_of(plans[0]))
    (ahead,) = plan_of(bench).slices
    assert (ahead.awaits_token, ahead.start, ahead.output_index) == (True, 70, 1)
    assert bench.scheduler.stage_of(rid("a")) is Stage.COMPUTING


@pytest.mark.parametrize("changes", [{"n": 3}, {"prompt_logprobs": 0}, {"max_tokens": 1}])
def test_some_first_tokens_are_waited_for(changes: dict[str, object]):
    bench = DecodeBench()
    bench.scheduler.submit_local(with_sampling(make_request("a", 9), **changes))
    plan = plan_of(bench)
    assert bench.scheduler.plan_step() is None
    assert bench.scheduler.has_work
    assert bench.scheduler.complete_step(plan, bench.runner.run(plan))


def test_B2_nobody_is_let_go_for_a_block_while_a_step_is_in_flight():
    bench = DecodeBench(num_blocks=7)
    for name in ("old", "young"):
        bench.run_landed(make_request(name, 2 * BLOCK_SIZE, max_tokens=20))
    assert bench.scheduler.load().free_blocks == 1
    plans = []
    while (plan := bench.scheduler.plan_step()) is not None:
        assert names(plan) == ["old", "young"]
        assert bench.scheduler.take_let_go() == ()
        plans.append(plan)
        if len(plans) == 2:
            done = plans.pop(0)
            bench.scheduler.complete_step(done, result_of(done))
    assert bench.scheduler.take_let_go() == ()
    (done,) = plans
    bench.scheduler.complete_step(done, result_of(done))
    assert names(plan_of(bench)) == ["old"]
    (let_go,) = bench.scheduler.take_let_go()
    assert (let_go.request.request_id, let_go.stage) == ("young", Stage.RUNNING)
    # All of its tokens were told: none was in flight when it went.
    assert let_go.next_index == 1 + BLOCK_SIZE


def test_a_drain_gives_up_what_flies_at_the_first_token_nobody_has_seen():
    bench = DecodeBench()
    bench.run_landed(make_request("a", 8))
    first, second = plan_of(bench), plan_of(bench)
    bench.scheduler.complete_step(first, result_of(first))
    (let_go,) = bench.scheduler.drain()
    assert let_go.next_index == 2
    assert bench.scheduler.complete_step(second, result_of(second)) == ()
    bench.assert_idle()


def test_a_block_that_a_step_in_flight_copies_stays_although_its_last_owner_went_before():
    bench = DecodeBench()
    bench.scheduler.submit_local(make_request("g", BLOCK_SIZE + 1, n=2, max_tokens=9))
    plan = plan_of(bench)
    bench.scheduler.complete_step(plan, bench.runner.run(plan))
    # g#0 gets a copy of the block they share, g#1 the block itself.
    first = plan_of(bench)
    ((source, _),) = first.copies
    bench.scheduler.cancel(rid("g#1"))
    bench.scheduler.cancel(rid("g#0"))
    bench.scheduler.check()
    pool = bench.scheduler._occupancy.cache.pool
    assert pool.num_references(source) == 1
    assert bench.scheduler.complete_step(first, result_of(first)) == ()
    assert pool.num_references(source) == 0
    bench.assert_idle()


def test_a_copy_may_read_a_block_whose_other_owner_was_cancelled_before_it_was_planned():
    bench = DecodeBench(max_num_seqs=2)
    bench.scheduler.submit_local(make_request("g", BLOCK_SIZE + 1, n=4, max_tokens=9))
    plan = plan_of(bench)
    bench.scheduler.complete_step(plan, bench.runner.run(plan))
    # On two seats: g#2 and g#3 share their block until they get a turn.
    first = plan_of(bench)
    assert names(first) == ["g#0", "g#1"]
    for name in ("g#0", "g#1", "g#3"):
        bench.scheduler.cancel(rid(name))
    second = plan_of(bench)
    ((source, _),) = second.copies
    bench.scheduler.complete_step(first, result_of(first))
    bench.scheduler.check()
    pool = bench.scheduler._occupancy.cache.pool
    assert pool.num_references(source) == 1
    bench.scheduler.complete_step(second, result_of(second))
    assert pool.num_references(source) == 0


def test_steps_are_completed_in_the_order_in_which_they_were_planned():
    bench = DecodeBench()
    bench.run_landed(make_request("a", 8))
    plan_of(bench)
    second = plan_of(bench)
    with pytest.raises(AssertionError, match="in the order"):
        bench.scheduler.complete_step(second, result_of(second))


def test_slices_of_dropped_sequences_are_not_live():
    bench = DecodeBench()
    for name in ("a", "b"):
        bench.run_landed(make_request(name, 8))
    plan = plan_of(bench)
    bench.scheduler.cancel(rid("a"))
    assert [part.request.request_id for part in bench.scheduler.live_slices(plan)] == ["b"]


def test_a_sequence_that_lands_while_a_step_is_in_flight_is_in_the_next_one():
    bench = DecodeBench()
    bench.run_landed(make_request("a", 8))
    plan_of(bench)
    bench.run_landed(make_request("b", 8))
    plan = plan_of(bench)
    assert [(part.request.request_id, part.awaits_token) for part in plan.slices] == [
        ("a", True),
        ("b", False),
    ]
    assert plan.slices[1].token_ids == expected_output(make_request("b", 8))[:1]
