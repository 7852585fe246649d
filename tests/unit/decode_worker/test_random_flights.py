"""Several steps in flight give the tokens of one, whatever comes in between."""

import random
from dataclasses import replace

import pytest

from pdserve.request import Request
from tests.support.flying import BLOCK_SIZE, FlyingBench
from tests.support.scheduling import expected_output, make_request


def draw_request(rng: random.Random, index: int, shared: tuple[int, ...]) -> Request:
    """Some share a prefix, stop early, have several samples, or are chosen on the host."""
    prompt = shared[: rng.choice((0, 5, 8, 12))]
    prompt += tuple(rng.randrange(9) for _ in range(rng.choice((1, 4, 15, 40))))
    request = make_request(
        f"r{index}",
        prompt,
        max_tokens=rng.choice((1, 2, 9, 30)),
        n=rng.choice((1, 1, 1, 3)),
    )
    kind = rng.randrange(6)
    sampling = request.sampling
    if kind == 0:
        # Never in the first place: a hand-off that ends with its first token is not started.
        output = expected_output(request.samples()[0])
        sampling = replace(sampling, stop_token_ids=(output[len(output) // 2],))
    elif kind == 1:
        sampling = replace(sampling, presence_penalty=0.5)
    elif kind == 2:
        sampling = replace(sampling, logprobs=2)
    return replace(request, sampling=sampling)


def num_needed_blocks(request: Request) -> int:
    total = request.num_prompt_tokens + request.sampling.max_tokens
    return -(-total // BLOCK_SIZE) + 2 * request.sampling.n


def run_random(
    seed: int, max_steps_in_flight: int, num_stages: int = 1, *, has_cancels: bool
) -> FlyingBench:
    rng = random.Random(seed)
    shared = tuple(rng.randrange(9) for _ in range(12))
    requests = [draw_request(rng, index, shared) for index in range(14)]
    largest = max(num_needed_blocks(request) for request in requests)
    mean = sum(num_needed_blocks(request) for request in requests) / len(requests)
    bench = FlyingBench(
        max(largest, round(4 * mean / rng.uniform(1.1, 1.6))),
        seed=seed,
        max_steps_in_flight=max_steps_in_flight,
        num_stages=num_stages,
        max_num_batched_tokens=rng.choice((7, 64, 100)),
        max_num_seqs=rng.choice((2, 4, 16)),
    )
    for _ in range(20_000):
        while requests and rng.random() < 0.3:
            request = requests.pop()
            bench.add(request, wants_handoff=rng.random() < 0.5)
        if has_cancels and bench.live and rng.random() < 0.1:
            bench.cancel(rng.choice(bench.live))
        has_moved = bench.turn()
        if not requests and not bench.live and bench.pipeline.is_empty:
            return bench
        assert has_moved or not bench.live or bench.to_place, "nothing can go on"
    raise AssertionError("not done in bounded time")


PIPELINES = [(2, 2), (2, 3), (3, 3), (4, 5)]
"""Stages, and steps in flight: with one more than stages, tokens are fed on the device."""


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_every_request_gets_the_tokens_it_gets_alone(seed: int, max_steps_in_flight: int):
    bench = run_random(seed, max_steps_in_flight, has_cancels=False)
    assert not bench.cancelled
    bench.assert_all_done()
    assert bench.runner.max_seen_in_flight == max_steps_in_flight


@pytest.mark.parametrize(("num_stages", "max_steps_in_flight"), PIPELINES)
@pytest.mark.parametrize("seed", range(300, 320))
def test_B9_a_pipeline_gives_the_same_tokens_and_its_cancels_leave_no_block(
    seed: int, num_stages: int, max_steps_in_flight: int
):
    bench = run_random(seed, max_steps_in_flight, num_stages, has_cancels=seed % 2 == 0)
    bench.assert_all_done()
    assert bench.runner.max_seen_in_flight > 1


@pytest.mark.parametrize("seed", range(100, 140))
def test_cancels_at_random_instants_leak_no_token_and_leave_no_block(seed: int):
    run_random(seed, 2, has_cancels=True).assert_all_done()


def test_the_random_runs_await_tokens_let_sequences_go_and_hit_the_cache():
    benches = [run_random(seed, 2, has_cancels=False) for seed in range(20)]
    assert sum(bench.runner.num_awaited for bench in benches) > 300
    assert sum(bench.num_let_go for bench in benches) > 10
    assert sum(bench.scheduler.counters.prefix_cache_hits for bench in benches) > 100


@pytest.mark.soak
def test_many_seeds():
    for seed in range(1000, 6000):
        run_random(seed, 2, has_cancels=seed % 2 == 0).assert_all_done()
        stages, in_flight = PIPELINES[seed % len(PIPELINES)]
        run_random(seed, in_flight, stages, has_cancels=seed % 3 == 0).assert_all_done()
