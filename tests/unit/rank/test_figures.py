"""What a scheduler tells of itself."""

from pdserve.rank.figures import MAX_COMPUTING_TOLD, describe_load
from tests.support.prefill_bench import PrefillBench
from tests.support.scheduling import make_request


def test_prompts_that_are_computed_are_named_but_not_those_that_wait_or_are_held() -> None:
    bench = PrefillBench(max_num_batched_tokens=8)
    for name, size in (("done", 8), ("long", 20), ("next", 8)):
        bench.scheduler.submit(make_request(name, size))
    bench.step()
    bench.step()
    load = describe_load(bench.scheduler)
    assert list(load.computing) == ["long"]
    assert (load.num_waiting, load.num_running) == (1, 1)


def test_of_many_prompts_those_that_came_first_are_named() -> None:
    bench = PrefillBench(max_num_seqs=64)
    names = [f"r{number}" for number in range(MAX_COMPUTING_TOLD + 4)]
    for name in names:
        bench.scheduler.submit(make_request(name, 2))
    assert bench.scheduler.plan_step() is not None
    assert list(describe_load(bench.scheduler).computing) == names[:MAX_COMPUTING_TOLD]
