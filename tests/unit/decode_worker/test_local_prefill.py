import pytest

from decode_worker.admission import RefusalReason
from pdserve.engine.scheduler import Stage
from pdserve.errors import InvalidField, LocalPrefillRefused, Overloaded
from pdserve.request import RequestId
from tests.support.decode_bench import DecodeBench
from tests.support.scheduling import expected_output, make_request


def rid(name: str) -> RequestId:
    return RequestId(name)


def test_local_prefill_shares_the_step_and_the_budget_with_decodes():
    bench = DecodeBench(max_num_batched_tokens=66)
    bench.run_landed(make_request("a", 8, max_tokens=30))
    bench.run_landed(make_request("b", 8, max_tokens=30))
    local = make_request("local", 100, max_tokens=5)
    bench.scheduler.submit_local(local)
    plan = bench.scheduler.plan_step()
    assert plan is not None
    assert [(p.request.request_id, len(p.token_ids)) for p in plan.slices] == [
        ("a", 1),
        ("b", 1),
        ("local", 64),
    ]
    bench.scheduler.complete_step(plan, bench.runner.run(plan))
    bench.run()
    assert bench.output_of(local) == expected_output(local)
    assert bench.finished[rid("local")].num_computed_here == 100
    assert bench.scheduler.counters.prompt_tokens == 100


def test_a_local_prefill_is_timed_and_reports_its_cached_tokens():
    bench = DecodeBench()
    bench.scheduler.submit_local(make_request("a", 8, max_tokens=2))
    bench.run()
    bench.clock.advance(1.0)
    bench.scheduler.submit_local(
        make_request("b", (*make_request("a", 8).token_ids, 1), max_tokens=1)
    )
    bench.clock.advance(2.0)
    bench.run()
    done = bench.finished[rid("b")]
    assert (done.num_cached_tokens, done.num_computed_here) == (8, 1)
    assert (done.times.queue_s, done.times.prefill_s) == pytest.approx((2.0, 0.01))


def test_landing_sequences_do_not_starve_a_prompt_that_is_being_computed():
    bench = DecodeBench(num_blocks=128, max_num_seqs=2, max_num_batched_tokens=64)
    bench.scheduler.submit_local(make_request("local", 200, max_tokens=2))
    bench.step()
    for index in range(4):
        bench.run_landed(make_request(f"r{index}", 4, max_tokens=100))
    for _ in range(6):
        bench.step()
    assert rid("local") in bench.outputs


def test_reservations_do_not_starve_a_waiting_prompt():
    bench = DecodeBench(num_blocks=8)
    bench.run_landed(make_request("a", 8, max_tokens=12))
    bench.scheduler.submit_local(make_request("local", 20, max_tokens=4))
    bench.step()
    assert bench.scheduler.stage_of(rid("local")) is Stage.WAITING
    assert bench.refuse(make_request("b", 1, max_tokens=2)).reason is RefusalReason.NO_ROOM
    bench.run()
    assert rid("local") in bench.finished


def test_prompts_beyond_the_local_limit_are_refused_unless_cached():
    bench = DecodeBench(max_local_prefill_tokens=4)
    prompt = make_request("a", 10).token_ids
    with pytest.raises(LocalPrefillRefused):
        bench.scheduler.submit_local(make_request("b", prompt))
    bench.run_landed(make_request("a", prompt))
    bench.scheduler.submit_local(make_request("b", prompt))
    bench.run()
    assert bench.output_of(make_request("b", prompt)) == bench.output_of(make_request("a", prompt))


def test_a_worker_without_local_prefill_computes_no_prompt_at_all():
    bench = DecodeBench(max_local_prefill_tokens=0)
    with pytest.raises(LocalPrefillRefused):
        bench.scheduler.submit_local(make_request("a", 1))


def test_a_waiting_prompt_whose_cached_part_was_evicted_is_let_go_not_computed():
    bench = DecodeBench(num_blocks=6, max_local_prefill_tokens=4)
    prompt = make_request("a", 10).token_ids
    bench.run_landed(make_request("a", prompt, max_tokens=2))
    bench.run()
    bench.run_landed(make_request("big", 8, max_tokens=17))
    bench.scheduler.submit_local(make_request("b", prompt, max_tokens=2))
    bench.run()
    assert [(e.request.request_id, e.stage) for e in bench.let_go] == [("b", Stage.WAITING)]
    assert bench.scheduler.counters.prompt_tokens == 0
    bench.assert_idle()


def test_a_full_queue_and_an_empty_prompt_are_refused():
    bench = DecodeBench(max_waiting=1)
    with pytest.raises(InvalidField):
        bench.scheduler.submit_local(make_request("empty", 0))
    bench.scheduler.submit_local(make_request("a", 4))
    with pytest.raises(Overloaded):
        bench.scheduler.submit_local(make_request("b", 4))
