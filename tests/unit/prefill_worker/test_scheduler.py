import random

import pytest

from pdserve.engine.scheduler import Stage
from pdserve.errors import InvalidField, Overloaded, StaleAttempt, TooLong
from pdserve.request import FinishReason, RequestId
from tests.support.prefill_bench import PrefillBench
from tests.support.scheduling import continue_request, expected_output, make_request


def rid(name: str) -> RequestId:
    return RequestId(name)


def test_a_prompt_is_computed_and_its_next_token_sampled():
    bench = PrefillBench()
    request = make_request("a", 10)
    bench.scheduler.submit(request)
    (progress,) = bench.step()
    assert progress.samples
    assert (progress.num_computed, progress.output_index) == (10, 0)
    assert progress.samples[0].token.token_id == expected_output(request)[0]
    assert bench.scheduler.stage_of(rid("a")) is Stage.HELD


@pytest.mark.parametrize("budget", [1, 3, 16, 37, 64, 65, 130, 256])
def test_no_step_exceeds_its_budget_and_the_chunks_give_the_same_token(budget: int):
    bench = PrefillBench(num_blocks=128, max_num_batched_tokens=budget)
    requests = [make_request(name, size) for name, size in (("a", 150), ("b", 7), ("c", 70))]
    for request in requests:
        bench.scheduler.submit(request)
    tokens = {}
    while bench.scheduler.has_work:
        plan = bench.scheduler.plan_step()
        assert plan is not None
        assert 0 < plan.num_tokens <= budget
        for progress in bench.scheduler.complete_step(plan, bench.runner.run(plan)):
            if progress.samples:
                tokens[progress.request_id] = progress.samples[0].token.token_id
    assert tokens == {request.request_id: expected_output(request)[0] for request in requests}


def test_one_step_computes_no_more_sequences_than_allowed():
    bench = PrefillBench(max_num_seqs=3)
    for index in range(5):
        bench.scheduler.submit(make_request(f"r{index}", 4))
    plan = bench.scheduler.plan_step()
    assert plan is not None
    assert [part.request.request_id for part in plan.slices] == ["r0", "r1", "r2"]


def test_prompts_are_served_in_order_returned_ones_first():
    bench = PrefillBench(max_num_batched_tokens=8)
    for name, is_priority in (("a", False), ("b", False), ("back", True)):
        bench.scheduler.submit(make_request(name, 8, is_priority=is_priority))
    order = [progress.request_id for _ in range(3) for progress in bench.step()]
    assert order == ["back", "a", "b"]


def test_a_long_prompt_does_not_hold_up_what_fits_beside_its_last_chunk():
    bench = PrefillBench(max_num_batched_tokens=64)
    bench.scheduler.submit(make_request("long", 100))
    bench.scheduler.submit(make_request("short", 20))
    assert [p.request_id for p in bench.step()] == ["long"]
    assert [p.request_id for p in bench.step() if p.samples] == ["long", "short"]


def test_a_prefix_hit_is_not_computed_again():
    bench = PrefillBench()
    shared = tuple(range(100, 110))
    first, second = make_request("a", (*shared, 1, 2)), make_request("b", (*shared, 7, 8, 9))
    bench.scheduler.submit(first)
    bench.run_until_held("a")
    bench.scheduler.submit(second)
    plan = bench.scheduler.plan_step()
    assert plan is not None
    assert plan.slices[0].start == bench.scheduler.num_cached_tokens(rid("b")) == 8
    (progress,) = bench.scheduler.complete_step(plan, bench.runner.run(plan))
    assert progress.samples
    assert progress.samples[0].token.token_id == expected_output(second)[0]
    assert bench.scheduler.counters.prefix_cache_hits == 8
    assert bench.scheduler.counters.prefix_cache_queries == 12 + 13
    assert bench.scheduler.counters.prompt_tokens == 12 + 5


def test_full_blocks_of_an_unfinished_prompt_are_found_already():
    bench = PrefillBench(max_num_batched_tokens=64)
    prompt = tuple(range(200))
    bench.scheduler.submit(make_request("a", prompt))
    bench.step()
    bench.scheduler.submit(make_request("b", prompt[:66], is_priority=True))
    bench.run_until_held("b")
    assert bench.scheduler.num_cached_tokens(rid("b")) == 64


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
def test_the_last_token_is_computed_even_if_all_of_the_prompt_is_cached(num_tokens: int):
    bench = PrefillBench()
    prompt = tuple(range(num_tokens))
    bench.scheduler.submit(make_request("a", prompt))
    first = bench.run_until_held("a")
    bench.scheduler.submit(make_request("b", prompt))
    second = bench.run_until_held("b")
    assert bench.scheduler.num_cached_tokens(rid("b")) == (num_tokens - 1) // 4 * 4
    assert first.samples[0].token == second.samples[0].token


def test_tenants_share_no_prefix():
    bench = PrefillBench()
    bench.scheduler.submit(make_request("a", tuple(range(9)), salt=b"one"))
    bench.run_until_held("a")
    bench.scheduler.submit(make_request("b", tuple(range(9)), salt=b"two"))
    bench.run_until_held("b")
    assert bench.scheduler.num_cached_tokens(rid("b")) == 0


def test_held_blocks_make_the_next_prompt_wait_until_they_are_released():
    bench = PrefillBench(num_blocks=4)
    bench.scheduler.submit(make_request("a", 12))
    bench.scheduler.submit(make_request("b", 12))
    bench.run_until_held("a")
    assert bench.step() == ()
    assert not bench.scheduler.has_work
    assert (bench.scheduler.num_held, bench.scheduler.load().num_waiting) == (1, 1)
    bench.scheduler.release(rid("a"), 1)
    assert bench.run_until_held("b").samples


def test_a_large_prompt_at_the_head_is_not_passed_by_small_ones_for_ever():
    bench = PrefillBench(num_blocks=4)
    bench.scheduler.submit(make_request("a", 8))
    bench.run_until_held("a")
    bench.scheduler.submit(make_request("large", 16))
    bench.scheduler.submit(make_request("small", 4))
    assert bench.step() == ()
    bench.scheduler.release(rid("a"), 1)
    assert [p.request_id for p in bench.step()] == ["large"]


def test_a_released_prompt_stays_in_the_prefix_cache():
    bench = PrefillBench()
    bench.scheduler.submit(make_request("a", 11))
    bench.run_until_held("a")
    bench.scheduler.release(rid("a"), 1)
    bench.assert_idle()
    assert bench.scheduler.ledger().cached_blocks == 2


def test_a_resumed_request_samples_the_token_after_those_the_client_has():
    bench = PrefillBench()
    request = make_request("a", 9, max_tokens=20)
    output = expected_output(request)
    bench.scheduler.submit(continue_request(request, output[:7]))
    progress = bench.run_until_held("a")
    assert progress.samples
    assert (progress.attempt, progress.output_index) == (2, 7)
    assert progress.samples[0].token.token_id == output[7]


def test_a_token_that_ends_the_output_says_so():
    bench = PrefillBench()
    request = make_request("a", 9, max_tokens=1)
    bench.scheduler.submit(request)
    assert bench.run_until_held("a").samples[0].finish_reason is FinishReason.LENGTH
    stop = expected_output(request)[0]
    bench.scheduler.submit(make_request("b", request.token_ids, stop_token_ids=(stop,)))
    assert bench.run_until_held("b").samples[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("stage", [Stage.WAITING, Stage.COMPUTING, Stage.HELD])
def test_a_cancel_at_any_stage_gives_all_blocks_back(stage: Stage):
    bench = PrefillBench(max_num_batched_tokens=64)
    bench.scheduler.submit(make_request("a", 100))
    while bench.scheduler.stage_of(rid("a")) is not stage:
        bench.step()
    assert bench.scheduler.cancel(rid("a"))
    bench.assert_idle()
    assert not bench.scheduler.cancel(rid("a"))
    assert bench.scheduler.plan_step() is None


def test_a_cancel_while_a_step_runs_drops_its_result():
    bench = PrefillBench()
    bench.scheduler.submit(make_request("a", 10))
    bench.scheduler.submit(make_request("b", 10))
    plan = bench.scheduler.plan_step()
    assert plan is not None
    bench.scheduler.cancel(rid("a"))
    progress = bench.scheduler.complete_step(plan, bench.runner.run(plan))
    assert [entry.request_id for entry in progress] == ["b"]
    bench.scheduler.release(rid("b"), 1)
    bench.assert_idle()


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_request_that_is_queued_again_while_a_step_runs_takes_nothing_from_it(attempt: int):
    bench = PrefillBench()
    first = make_request("a", 10)
    bench.scheduler.submit(first)
    plan = bench.scheduler.plan_step()
    assert plan is not None
    bench.scheduler.cancel(rid("a"))
    bench.scheduler.submit(first if attempt == 1 else make_request("a", 10, attempt=2))
    assert bench.scheduler.complete_step(plan, bench.runner.run(plan)) == ()
    bench.scheduler.check()
    (progress,) = bench.step()
    assert progress.attempt == attempt


def test_a_cancel_of_an_older_attempt_leaves_the_newer_one():
    bench = PrefillBench()
    bench.scheduler.submit(make_request("a", 10, attempt=3))
    assert not bench.scheduler.cancel(rid("a"), attempt=2)
    assert bench.scheduler.cancel(rid("a"), attempt=3)


def test_a_newer_attempt_replaces_an_older_one_and_frees_its_blocks():
    bench = PrefillBench(num_blocks=8)
    bench.scheduler.submit(make_request("a", 30))
    bench.run_until_held("a")
    bench.scheduler.submit(make_request("a", 30, attempt=2))
    assert bench.scheduler.num_held == 0
    assert bench.run_until_held("a").attempt == 2
    for attempt in (1, 2):
        with pytest.raises(StaleAttempt):
            bench.scheduler.submit(make_request("a", 30, attempt=attempt))
    assert bench.scheduler.counters.stale_refused == 2


def test_a_release_of_what_is_not_held_is_refused():
    bench = PrefillBench()
    bench.scheduler.submit(make_request("a", 30))
    for name in ("a", "b"):
        with pytest.raises(StaleAttempt):
            bench.scheduler.release(rid(name), 1)
    bench.run_until_held("a")
    with pytest.raises(StaleAttempt):
        bench.scheduler.release(rid("a"), 2)
    assert bench.scheduler.num_held == 1


def test_a_full_queue_and_impossible_prompts_are_refused():
    bench = PrefillBench(num_blocks=4, max_waiting=1)
    with pytest.raises(TooLong, match="at most 16"):
        bench.scheduler.submit(make_request("long", 17))
    with pytest.raises(InvalidField):
        bench.scheduler.submit(make_request("empty", 0))
    bench.scheduler.submit(make_request("a", 16))
    with pytest.raises(Overloaded):
        bench.scheduler.submit(make_request("b", 4))
    assert len(bench.scheduler.requests()) == 1


def test_waiting_and_computing_are_timed_apart():
    bench = PrefillBench(max_num_batched_tokens=64)
    bench.scheduler.submit(make_request("a", 64))
    bench.scheduler.submit(make_request("b", 128))
    bench.run_until_held("b")
    times = bench.scheduler.times(rid("b"))
    assert (times.queue_s, times.prefill_s) == (1.0, 2.0)


def test_a_passed_deadline_is_reported_at_any_stage():
    bench = PrefillBench()
    bench.scheduler.submit(make_request("a", 8, deadline_s=5.0))
    bench.run_until_held("a")
    assert bench.scheduler.expired(4.9) == ()
    assert bench.scheduler.expired(5.0) == ("a",)


def test_load_tells_queue_and_blocks():
    bench = PrefillBench(num_blocks=40, max_num_batched_tokens=64)
    bench.scheduler.submit(make_request("a", 100))
    bench.scheduler.submit(make_request("b", 20))
    bench.step()
    load = bench.scheduler.load()
    assert (load.num_waiting, load.num_running, load.queued_tokens) == (1, 1, 36 + 20)
    assert (load.active_blocks, load.free_blocks, load.total_blocks) == (25, 15, 40)


@pytest.mark.parametrize("seed", range(30))
def test_A1_random_submits_cancels_and_releases_leave_no_block_behind(seed: int):
    rng = random.Random(seed)
    bench = PrefillBench(
        num_blocks=rng.randint(6, 30), max_num_batched_tokens=rng.choice((5, 64, 100))
    )
    held: set[RequestId] = set()
    for index in range(60):
        size = rng.randint(1, 24)
        request = make_request(f"r{index}", tuple(rng.randrange(2) for _ in range(size)))
        bench.scheduler.submit(request)
        for progress in bench.step():
            if progress.samples:
                held.add(progress.request_id)
        if rng.random() < 0.3:
            name = rid(f"r{rng.randrange(index + 1)}")
            bench.scheduler.cancel(name)
            held.discard(name)
        if held and rng.random() < 0.5:
            bench.scheduler.release(held.pop(), 1)
    while bench.scheduler.has_work or held:
        held |= {progress.request_id for progress in bench.step() if progress.samples}
        if held:
            bench.scheduler.release(held.pop(), 1)
    bench.assert_idle()
