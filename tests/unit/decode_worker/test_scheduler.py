import pytest

from decode_worker.admission import RefusalReason
from pdserve.engine.scheduler import Stage
from pdserve.errors import InvalidField, StaleAttempt, TooLong
from pdserve.request import FinishReason, RequestId
from tests.support.decode_bench import DecodeBench
from tests.support.scheduling import continue_request, expected_output, make_request


def rid(name: str) -> RequestId:
    return RequestId(name)


def test_a_landed_sequence_goes_on_from_its_first_token_and_computes_no_prompt():
    bench = DecodeBench()
    request = make_request("a", 10, max_tokens=12)
    bench.run_landed(request)
    bench.run()
    assert bench.output_of(request) == expected_output(request)
    assert bench.finished[rid("a")].finish_reason is FinishReason.LENGTH
    assert bench.finished[rid("a")].num_computed_here == 0
    assert bench.scheduler.counters.prompt_tokens == 0
    bench.assert_idle()


def test_a_stop_token_ends_the_output():
    bench = DecodeBench()
    stop = expected_output(make_request("a", 10, max_tokens=9))[4]
    request = make_request("a", 10, max_tokens=9, stop_token_ids=(stop,))
    bench.run_landed(request)
    bench.run()
    assert len(bench.output_of(request)) == 5
    assert bench.finished[rid("a")].finish_reason is FinishReason.STOP


def test_a_first_token_that_ends_the_output_is_refused():
    bench = DecodeBench()
    request = make_request("a", 10, max_tokens=1)
    bench.reserve(request)
    with pytest.raises(InvalidField):
        bench.scheduler.start(rid("a"), 1, {0: 5})


def test_a_grant_covers_prompt_and_growth_and_holds_it_at_once():
    bench = DecodeBench(num_blocks=10)
    grant = bench.reserve(make_request("a", 9))
    assert (len(grant.block_ids), grant.num_cached_tokens) == (4, 0)
    load = bench.scheduler.load()
    assert (load.reserved_blocks, load.free_blocks, load.active_blocks) == (4, 6, 0)


def test_a_grant_may_cover_all_full_blocks_from_the_cache():
    bench = DecodeBench()
    prompt = make_request("a", 8).token_ids
    bench.run_landed(make_request("a", prompt, max_tokens=4))
    bench.run()
    request = make_request("b", prompt, max_tokens=4)
    grant = bench.run_landed(request)
    assert grant.num_cached_tokens == 8
    bench.run()
    assert bench.output_of(request) == expected_output(request)


def test_cached_blocks_of_a_grant_are_held_until_it_is_released():
    bench = DecodeBench(num_blocks=6)
    prompt = make_request("a", 8).token_ids
    bench.run_landed(make_request("a", prompt, max_tokens=2))
    bench.run()
    grant = bench.reserve(make_request("b", prompt, max_tokens=4))
    other = bench.reserve(make_request("c", 8, max_tokens=4))
    assert not set(grant.block_ids) & set(other.block_ids)
    assert bench.scheduler.load().reserved_blocks == 1 + 3
    assert bench.scheduler.release_reservation(rid("b"), 1)
    assert bench.scheduler.release_reservation(rid("c"), 1)
    bench.assert_idle()


def test_a_follow_up_finds_the_tokens_that_were_generated():
    bench = DecodeBench()
    request = make_request("a", 10, max_tokens=11)
    bench.run_landed(request)
    bench.run()
    turn = make_request("b", (*request.token_ids, *expected_output(request), 1, 2, 3))
    assert bench.reserve(turn).num_cached_tokens == 20


def test_B2_room_to_grow_is_kept_for_each_running_sequence():
    bench = DecodeBench(num_blocks=9)
    bench.run_landed(make_request("a", 8, max_tokens=20))
    bench.run_landed(make_request("b", 4, max_tokens=20))
    refusal = bench.refuse(make_request("c", 8, max_tokens=20))
    assert refusal.reason is RefusalReason.NO_ROOM
    assert refusal.retry_after_s is not None
    assert bench.scheduler.ledger().reservations == 0
    assert len(bench.reserve(make_request("d", 4, max_tokens=20)).block_ids) == 2


def test_a_refusal_takes_nothing_not_even_cached_blocks():
    bench = DecodeBench(num_blocks=5)
    bench.run_landed(make_request("a", 8, max_tokens=2))
    bench.run()
    bench.reserve(make_request("b", 8, max_tokens=8))
    before = bench.scheduler.ledger()
    bench.refuse(make_request("c", (*make_request("a", 8).token_ids, 1), max_tokens=8))
    assert bench.scheduler.ledger() == before


def test_what_exceeds_the_pool_alone_is_refused_for_good():
    bench = DecodeBench(num_blocks=4)
    refusal = bench.refuse(make_request("a", 8, max_tokens=10))
    assert (refusal.reason, refusal.retry_after_s) == (RefusalReason.TOO_LARGE, None)
    with pytest.raises(TooLong):
        bench.scheduler.submit_local(make_request("a", 8, max_tokens=10))


@pytest.mark.parametrize("is_local", [True, False])
def test_a_sequence_that_is_alone_may_fill_the_whole_pool(is_local: bool):
    bench = DecodeBench(num_blocks=4)
    request = make_request("a", 8, max_tokens=9)
    if is_local:
        bench.scheduler.submit_local(request)
    else:
        bench.run_landed(request)
    bench.run()
    assert bench.output_of(request) == expected_output(request)
    assert bench.scheduler.counters.preemptions == 0


def test_the_youngest_goes_when_blocks_run_out_and_its_tokens_stay_cached():
    bench = DecodeBench(num_blocks=7)
    old, young = make_request("old", 8, max_tokens=13), make_request("young", 8, max_tokens=13)
    bench.run_landed(old)
    bench.run_landed(young)
    bench.run()
    (let_go,) = bench.let_go
    assert (let_go.request, let_go.stage) == (young, Stage.RUNNING)
    assert let_go.next_index == len(bench.output_of(young))
    assert bench.output_of(old) == expected_output(old)
    assert bench.scheduler.counters.preemptions == 1
    bench.assert_idle()


def test_B5_a_preempted_sequence_goes_on_elsewhere_without_a_token_missing_or_repeated():
    bench = DecodeBench(num_blocks=7)
    old, young = make_request("old", 8, max_tokens=13), make_request("young", 8, max_tokens=13)
    bench.run_landed(old)
    bench.run_landed(young)
    bench.run()
    emitted = bench.output_of(young)
    assert bench.let_go[0].next_index == len(emitted)
    bench.run_landed(continue_request(young, emitted))
    bench.run()
    assert bench.output_of(young) == expected_output(young)


def test_a_reservation_goes_before_an_older_running_sequence():
    bench = DecodeBench(num_blocks=11, max_num_seqs=1)
    bench.run_landed(make_request("old", 8, max_tokens=20))
    bench.run_landed(make_request("middle", 4, max_tokens=20))
    bench.reserve(make_request("young", 9, max_tokens=4))
    while not bench.let_go:
        bench.step()
    assert [(entry.request.request_id, entry.stage) for entry in bench.let_go] == [
        ("young", Stage.RESERVED)
    ]
    assert bench.scheduler.counters.preemptions == 0
    with pytest.raises(StaleAttempt):
        bench.scheduler.start(rid("young"), 1, {0: 5})
    with pytest.raises(StaleAttempt):
        bench.scheduler.block_table(rid("young"), 1)
    assert not bench.scheduler.release_reservation(rid("young"), 1)


def test_B4_a_sequence_that_lands_in_a_full_batch_keeps_its_state_until_it_gets_a_seat():
    bench = DecodeBench(max_num_seqs=2)
    requests = [make_request(f"r{i}", 9, max_tokens=6 + i) for i in range(5)]
    for request in requests:
        bench.run_landed(request)
    plan = bench.scheduler.plan_step()
    assert plan is not None
    assert [part.request.request_id for part in plan.slices] == ["r0", "r1"]
    bench.scheduler.complete_step(plan, bench.runner.run(plan))
    for request in requests[2:]:
        assert bench.scheduler.stage_of(request.request_id) is Stage.RUNNING
    while bench.scheduler.has_work:
        bench.step()
    for request in requests[2:]:
        assert bench.output_of(request) == expected_output(request)


def bring_to(bench: DecodeBench, stage: Stage) -> None:
    if stage is Stage.RESERVED:
        bench.reserve(make_request("a", 100))
        return
    bench.scheduler.submit_local(make_request("a", 100))
    while bench.scheduler.stage_of(rid("a")) is not stage:
        bench.step()


ALL_STAGES = (Stage.WAITING, Stage.COMPUTING, Stage.RESERVED, Stage.RUNNING)


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_a_cancel_at_any_stage_gives_all_blocks_back(stage: Stage):
    bench = DecodeBench()
    bring_to(bench, stage)
    assert not bench.scheduler.cancel(rid("a"), attempt=0)
    assert bench.scheduler.cancel(rid("a"), attempt=1)
    bench.assert_idle()
    assert not bench.scheduler.cancel(rid("a"))
    assert bench.scheduler.plan_step() is None


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_a_newer_attempt_replaces_an_older_one_at_any_stage(stage: Stage):
    bench = DecodeBench(num_blocks=32)
    bring_to(bench, stage)
    request = make_request("a", 100, attempt=2)
    bench.run_landed(request)
    with pytest.raises(StaleAttempt):
        bench.scheduler.start(rid("a"), 1, {0: 5})
    for attempt in (1, 2):
        stale = make_request("a", 100, attempt=attempt)
        with pytest.raises(StaleAttempt):
            bench.scheduler.reserve(stale)
        with pytest.raises(StaleAttempt):
            bench.scheduler.submit_local(stale)
    assert bench.scheduler.counters.stale_refused == 5
    assert len(bench.scheduler.requests()) == 1
    bench.outputs[rid("a")] = {0: expected_output(request)[0]}
    bench.run()
    assert bench.output_of(request) == expected_output(request)
    bench.assert_idle()


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_a_drain_lets_everything_go_and_leaves_nothing(stage: Stage):
    bench = DecodeBench()
    bring_to(bench, stage)
    (let_go,) = bench.scheduler.drain()
    assert let_go.stage is stage
    assert let_go.next_index == len(bench.outputs.get(rid("a"), {}))
    bench.assert_idle()
    assert bench.scheduler.take_let_go() == ()


def test_a_cancel_while_a_step_runs_drops_its_result():
    bench = DecodeBench()
    bench.run_landed(make_request("a", 8))
    bench.run_landed(make_request("b", 8))
    plan = bench.scheduler.plan_step()
    assert plan is not None
    bench.scheduler.cancel(rid("a"))
    progress = bench.scheduler.complete_step(plan, bench.runner.run(plan))
    assert [entry.request_id for entry in progress] == ["b"]


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_request_that_is_queued_again_while_a_step_runs_takes_nothing_from_it(attempt: int):
    bench = DecodeBench()
    first = make_request("a", 10)
    bench.scheduler.submit_local(first)
    plan = bench.scheduler.plan_step()
    assert plan is not None
    bench.scheduler.cancel(rid("a"))
    bench.scheduler.submit_local(first if attempt == 1 else make_request("a", 10, attempt=2))
    assert bench.scheduler.complete_step(plan, bench.runner.run(plan)) == ()
    bench.scheduler.check()
    (progress,) = bench.step()
    assert progress.attempt == attempt


def test_a_reservation_is_released_and_started_once():
    bench = DecodeBench()
    request = make_request("a", 8)
    bench.reserve(request)
    assert not bench.scheduler.release_reservation(rid("a"), 2)
    assert bench.scheduler.release_reservation(rid("a"), 1)
    assert not bench.scheduler.release_reservation(rid("a"), 1)
    grant = bench.reserve(request)
    bench.land(request, grant)
    with pytest.raises(StaleAttempt):
        bench.scheduler.start(rid("a"), 1, {0: 5})
    assert not bench.scheduler.release_reservation(rid("a"), 1)


def test_a_passed_deadline_is_reported():
    bench = DecodeBench()
    bench.reserve(make_request("a", 8, deadline_s=3.0))
    assert bench.scheduler.expired(2.9) == ()
    assert bench.scheduler.expired(3.0) == ("a",)


def test_the_parts_of_the_load_add_up():
    bench = DecodeBench(num_blocks=40)
    bench.run_landed(make_request("a", 8, max_tokens=2))
    bench.run()
    bench.run_landed(make_request("b", 9))
    bench.reserve(make_request("c", (*make_request("a", 8).token_ids, 5)))
    bench.scheduler.submit_local(make_request("d", 7))
    load = bench.scheduler.load()
    assert (load.num_waiting, load.num_running, load.queued_tokens) == (1, 1, 7)
    assert load.reserved_blocks == 2
    parts = load.free_blocks + load.cached_blocks + load.reserved_blocks + load.active_blocks
    assert parts == load.total_blocks == 40
