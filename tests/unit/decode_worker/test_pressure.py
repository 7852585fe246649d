"""Pools that are too small for what they are asked to hold."""

import random

import pytest

from pdserve.errors import Overloaded
from pdserve.request import Request
from prefill_worker.scheduler import PrefillScheduler
from tests.support.decode_bench import BLOCK_SIZE, DecodeBench
from tests.support.scheduling import continue_request, expected_output, make_request
from tests.support.two_pools import TwoPools


def draw_requests(rng: random.Random, count: int) -> list[Request]:
    """Some share a prefix; some are long, most are short."""
    shared = tuple(rng.randrange(9) for _ in range(12))
    return [
        make_request(
            f"r{index}",
            shared[: rng.choice((0, 5, 8, 12))] + tuple(rng.randrange(9) for _ in range(size)),
            max_tokens=rng.choice((1, 2, 9, 30)),
        )
        for index, size in enumerate(rng.choice((1, 4, 15, 40)) for _ in range(count))
    ]


def num_final_blocks(request: Request) -> int:
    return -(-(request.num_prompt_tokens + request.sampling.max_tokens - 1) // BLOCK_SIZE)


def oversubscribed(rng: random.Random, requests: list[Request]) -> int:
    """Blocks for four of the requests at a time, divided by 1.1 to 1.5; the largest one fits."""
    sizes = sorted(num_final_blocks(request) for request in requests)
    mean = sum(sizes) / len(sizes)
    return max(sizes[-1], round(4 * mean / rng.uniform(1.1, 1.5)))


def run_two_pools(seed: int, *, has_cancels: bool) -> TwoPools:
    rng = random.Random(seed)
    requests = draw_requests(rng, 12)
    pools = TwoPools(rng, oversubscribed(rng, requests), oversubscribed(rng, requests))
    max_ticks = 20 * sum(len(r.token_ids) + r.sampling.max_tokens for r in requests)
    for _ in range(max_ticks):
        while requests and rng.random() < 0.3:
            pools.add(requests.pop())
        if not pools.live and not requests:
            break
        assert pools.tick() or not pools.live, "nothing can go on"
        if has_cancels and pools.live and rng.random() < 0.05:
            pools.cancel(rng.choice(pools.live))
    assert not pools.live, "not done in bounded time"
    return pools


def assert_all_back(pools: TwoPools) -> None:
    for ledger in (pools.prefill.ledger(), pools.decode.ledger()):
        assert ledger.free_blocks + ledger.cached_blocks == ledger.total_blocks
        assert (ledger.sequences, ledger.reservations, ledger.held_handoffs) == (0, 0, 0)


def run_colocated(seed: int) -> DecodeBench:
    """One decode worker prefills for itself; what it lets go of comes back to it."""
    rng = random.Random(seed)
    requests = draw_requests(rng, 12)
    bench = DecodeBench(
        oversubscribed(rng, requests),
        max_num_batched_tokens=rng.choice((3, 16, 70)),
        max_num_seqs=rng.choice((2, 4, 16)),
        max_waiting=6,
    )
    arriving, latest = list(requests), {request.request_id: request for request in requests}
    for _ in range(20 * sum(len(r.token_ids) + r.sampling.max_tokens for r in requests)):
        while arriving:
            try:
                bench.scheduler.submit_local(arriving[0])
            except Overloaded:
                break
            arriving.pop(0)
        if not bench.scheduler.has_work:
            break
        bench.step()
        for let_go in bench.let_go:
            name = let_go.request.request_id
            emitted = tuple(bench.outputs.get(name, {}).values())
            assert let_go.next_index == len(emitted)
            latest[name] = continue_request(latest[name], emitted)
            arriving.insert(0, latest[name])
        bench.let_go.clear()
    for request in requests:
        assert bench.output_of(request) == expected_output(request)
    bench.assert_idle()
    return bench


@pytest.mark.parametrize("seed", [*range(40), 1067, 1081, 1093])
def test_B1_B3_B5_two_oversubscribed_pools_go_on_at_every_step_and_lose_no_token(seed: int):
    pools = run_two_pools(seed, has_cancels=False)
    for client in pools.clients.values():
        assert tuple(client.output) == expected_output(client.request)
    assert pools.decode.counters.prompt_tokens == 0
    assert_all_back(pools)


@pytest.mark.parametrize("seed", range(20))
def test_A6_cancels_at_random_instants_leave_no_block_in_either_pool(seed: int):
    assert_all_back(run_two_pools(seed, has_cancels=True))


@pytest.mark.parametrize("seed", range(40))
def test_B2_B7_one_oversubscribed_worker_goes_on_at_every_step_and_loses_no_token(seed: int):
    run_colocated(seed)


def test_the_simulated_pressure_does_preempt():
    pools = [run_two_pools(seed, has_cancels=False) for seed in range(40)]
    num_preemptions = [c.num_preemptions for p in pools for c in p.clients.values()]
    assert max(num_preemptions) >= 2
    assert sum(run_colocated(seed).scheduler.counters.preemptions for seed in range(40)) > 20


def test_B7_a_preempted_sequence_is_let_in_again_only_after_another_made_a_token():
    bench = DecodeBench(num_blocks=7)
    requests = [make_request(name, 8, max_tokens=13) for name in ("old", "young")]
    for request in requests:
        bench.scheduler.submit_local(request)
    latest, num_old_tokens = requests[1], []
    while bench.scheduler.has_work:
        bench.step()
        for let_go in bench.let_go:
            assert let_go.request.request_id == "young", "the oldest is never let go"
            num_old_tokens.append(len(bench.output_of(requests[0])))
            latest = continue_request(latest, bench.output_of(latest))
            bench.scheduler.submit_local(latest)
        bench.let_go.clear()
    assert num_old_tokens == sorted(set(num_old_tokens))
    assert [bench.output_of(request) for request in requests] == [
        expected_output(request) for request in requests
    ]


def test_B5_a_sequence_preempted_five_times_still_gives_its_own_tokens():
    bench = DecodeBench(num_blocks=40)
    request = latest = make_request("long", 4, max_tokens=150)
    num_let_go = 0

    def come_back_behind_others() -> None:
        for other in bench.scheduler.requests():
            bench.scheduler.cancel(other.request_id)
        for index in range(3):
            other = make_request(f"other{num_let_go}.{index}", 4, max_tokens=77, is_priority=True)
            bench.scheduler.submit_local(other)
        bench.scheduler.submit_local(latest)

    come_back_behind_others()
    while bench.scheduler.has_work:
        bench.step()
        mine = [entry for entry in bench.let_go if entry.request.request_id == "long"]
        bench.let_go.clear()
        if mine:
            num_let_go += 1
            latest = continue_request(latest, bench.output_of(latest))
            come_back_behind_others()
    assert num_let_go >= 5
    assert bench.output_of(request) == expected_output(request)
    bench.assert_idle()


@pytest.mark.soak
@pytest.mark.parametrize("batch", range(20))
def test_B1_B3_B5_ten_thousand_seeds(batch: int):
    for seed in range(1000 + 500 * batch, 1500 + 500 * batch):
        assert_all_back(run_two_pools(seed, has_cancels=seed % 2 == 0))
        run_colocated(seed)


def test_a_prefill_pool_full_of_held_prompts_refuses_when_its_queue_is_full_and_recovers():
    pools = TwoPools(random.Random(0), prefill_blocks=4, decode_blocks=64)
    scheduler: PrefillScheduler = pools.prefill
    scheduler.submit(make_request("held", 16))
    while scheduler.has_work:
        plan = scheduler.plan_step()
        assert plan is not None
        scheduler.complete_step(plan, pools.prefill_runner.run(plan))
    for index in range(8):
        scheduler.submit(make_request(f"r{index}", 4))
    with pytest.raises(Overloaded) as caught:
        scheduler.submit(make_request("more", 4))
    assert caught.value.retry_after_s > 0
    scheduler.release(make_request("held", 16).request_id, 1)
    assert scheduler.plan_step() is not None
