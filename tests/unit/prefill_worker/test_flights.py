"""What a prefill scheduler does while a step is in flight."""

from pdserve.engine.batch import StepPlan
from pdserve.engine.scheduler import Stage
from pdserve.request import RequestId
from tests.support.prefill_bench import PrefillBench
from tests.support.scheduling import make_request


def rid(name: str) -> RequestId:
    return RequestId(name)


def plan_of(bench: PrefillBench) -> StepPlan:
    plan = bench.scheduler.plan_step()
    assert plan is not None
    return plan


def ranges(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(part.request.request_id, part.start, part.end) for part in plan.slices]


def test_the_next_chunk_and_the_next_prompt_wait_for_no_step_in_flight():
    bench = PrefillBench(max_num_batched_tokens=64)
    bench.scheduler.submit(make_request("a", 100))
    bench.scheduler.submit(make_request("b", 28))
    first, second = plan_of(bench), plan_of(bench)
    assert ranges(first) == [("a", 0, 64)]
    assert ranges(second) == [("a", 64, 100), ("b", 0, 28)]
    assert not any(part.awaits_token for part in second.slices)
    assert bench.scheduler.plan_step() is None
    assert bench.scheduler.has_work
    (progress,) = bench.scheduler.complete_step(first, bench.runner.run(first))
    assert (progress.num_computed, progress.samples) == (64, ())
    done = bench.scheduler.complete_step(second, bench.runner.run(second))
    assert [(one.num_computed, len(one.samples)) for one in done] == [(100, 1), (28, 1)]
    assert not bench.scheduler.has_work


def test_a_chunk_in_flight_counts_and_is_cached_only_when_it_has_ended():
    bench = PrefillBench(max_num_batched_tokens=64)
    bench.scheduler.submit(make_request("a", 100))
    first = plan_of(bench)
    plan_of(bench)
    assert bench.scheduler.counters.prompt_tokens == 0
    assert bench.scheduler.load().queued_tokens == 100
    bench.scheduler.submit(make_request("same", make_request("a", 100).token_ids))
    bench.scheduler.complete_step(first, bench.runner.run(first))
    plan = plan_of(bench)
    # Only what was computed by then is found.
    assert ranges(plan) == [("same", 64, 100)]


def test_A6_blocks_of_a_cancelled_prompt_are_nobody_s_until_its_steps_have_ended():
    bench = PrefillBench(num_blocks=25, max_num_batched_tokens=64)
    bench.scheduler.submit(make_request("a", 100))
    first, second = plan_of(bench), plan_of(bench)
    bench.scheduler.complete_step(first, bench.runner.run(first))
    assert bench.scheduler.cancel(rid("a"))
    bench.scheduler.submit(make_request("b", 50))
    bench.scheduler.check()
    assert bench.scheduler.plan_step() is None
    assert bench.scheduler.complete_step(second, bench.runner.run(second)) == ()
    assert ranges(plan_of(bench)) == [("b", 0, 50)]


def test_blocks_that_no_step_in_flight_uses_are_free_at_once():
    bench = PrefillBench(num_blocks=8, max_num_batched_tokens=16)
    bench.scheduler.submit(make_request("held", 16))
    bench.run_until_held("held")
    bench.scheduler.submit(make_request("a", 16))
    plan = plan_of(bench)
    bench.scheduler.release(rid("held"), 1)
    bench.scheduler.submit(make_request("b", 16))
    assert ranges(plan_of(bench)) == [("b", 0, 16)]
    bench.scheduler.complete_step(plan, bench.runner.run(plan))
    assert bench.scheduler.stage_of(rid("a")) is Stage.HELD


def test_a_newer_attempt_takes_nothing_from_an_older_one_in_flight():
    bench = PrefillBench()
    bench.scheduler.submit(make_request("a", 20))
    old = plan_of(bench)
    bench.scheduler.submit(make_request("a", 20, attempt=2))
    new = plan_of(bench)
    assert bench.scheduler.complete_step(old, bench.runner.run(old)) == ()
    (progress,) = bench.scheduler.complete_step(new, bench.runner.run(new))
    assert (progress.attempt, progress.num_computed) == (2, 20)
    bench.scheduler.release(rid("a"), 2)
    bench.assert_idle()


def test_a_lone_prompt_is_cut_up_so_that_every_stage_has_a_part_of_it():
    bench = PrefillBench(num_blocks=600, max_num_batched_tokens=2048, num_stages=2)
    bench.scheduler.submit(make_request("a", 1024))
    plans = [plan_of(bench) for _ in range(4)]
    assert [ranges(plan)[0][1:] for plan in plans] == [
        (0, 256),
        (256, 512),
        (512, 768),
        (768, 1024),
    ]


def test_a_long_queue_fills_the_steps_of_a_pipeline():
    bench = PrefillBench(num_blocks=2000, max_num_batched_tokens=512, num_stages=2)
    for index in range(8):
        bench.scheduler.submit(make_request(f"r{index}", 512))
    assert [plan_of(bench).num_tokens for _ in range(3)] == [512, 512, 512]
