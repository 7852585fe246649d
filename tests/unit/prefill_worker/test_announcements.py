from pdserve.request import RequestId
from tests.support.prefill_bench import PrefillBench
from tests.support.scheduling import make_request


def rid(name: str) -> RequestId:
    return RequestId(name)


def test_each_request_is_announced_once_when_it_enters_the_window():
    bench = PrefillBench(look_ahead=2, max_num_batched_tokens=8)
    for index in range(4):
        bench.scheduler.submit(make_request(f"r{index}", 8))

    def announced() -> list[str]:
        return [str(request.request_id) for request in bench.scheduler.requests_in_window()]

    assert announced() == ["r0", "r1"]
    assert announced() == []
    bench.step()
    assert announced() == ["r2"]
    bench.step()
    assert announced() == ["r3"]


def test_B3_a_waiting_request_is_announced_only_if_its_blocks_are_sure():
    bench = PrefillBench(num_blocks=10, look_ahead=4)
    bench.scheduler.submit(make_request("held", 16))
    bench.run_until_held("held")
    bench.scheduler.requests_in_window()
    for name, size in (("fits", 16), ("does_not", 12), ("small", 4)):
        bench.scheduler.submit(make_request(name, size))
    assert [r.request_id for r in bench.scheduler.requests_in_window()] == ["fits"]
    bench.scheduler.release(rid("held"), 1)
    assert [r.request_id for r in bench.scheduler.requests_in_window()] == ["does_not", "small"]


def test_B3_no_returned_request_takes_the_blocks_of_an_announced_one():
    bench = PrefillBench(num_blocks=4, look_ahead=1)
    bench.scheduler.submit(make_request("announced", 16))
    bench.scheduler.requests_in_window()
    bench.scheduler.submit(make_request("back", 16, is_priority=True))
    assert [progress.request_id for progress in bench.step()] == ["announced"]


def test_without_look_ahead_a_request_is_announced_when_its_computing_begins():
    bench = PrefillBench(look_ahead=0, max_num_batched_tokens=64)
    bench.scheduler.submit(make_request("a", 100))
    assert bench.scheduler.requests_in_window() == ()
    bench.step()
    assert [r.request_id for r in bench.scheduler.requests_in_window()] == ["a"]
