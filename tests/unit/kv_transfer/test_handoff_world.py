"""Both sides of the hand-off joined by a bad network; see `world.py`."""

import pytest

from tests.unit.kv_transfer.node import CONFIG
from tests.unit.kv_transfer.world import Faults, World

SETTLE_S = 120.0
"""Virtual time after the last fault in which everything must have ended."""


def run_world(seed: int, faults: Faults, *, num_requests: int = 12, num_blocks: int = 200) -> World:
    world = World(seed, faults, num_blocks=num_blocks)
    for number in range(num_requests):
        num_tokens = world.rng.choice((1, 15, 16, 17, 64, 65, 200, 500))
        ends_here = world.rng.random() < 0.1
        world.after(
            world.rng.uniform(0, faults.calm_after_s * 0.7),
            lambda n=number, t=num_tokens, e=ends_here: world.router.submit(
                f"r{n}", t, ends_here=e
            ),
        )
    world.schedule_faults()
    world.run(faults.calm_after_s + SETTLE_S)
    world.check_quiet()
    return world


@pytest.mark.parametrize("seed", range(10))
def test_without_faults_every_request_finishes_at_its_first_attempt(seed: int) -> None:
    world = run_world(seed, Faults())
    for tracked in world.router.requests.values():
        assert tracked.ends == ["finished"]
        assert tracked.request.attempt == 1
        assert tracked.target is None or tracked.target.decode_attempt == 1


@pytest.mark.parametrize("seed", range(40))
def test_a_lossy_reordering_network_loses_no_request_and_leaks_no_block(seed: int) -> None:
    faults = Faults(lost=0.1, duplicated=0.2, corrupt=0.02, max_delay_s=0.6, stale_targets=0.05)
    world = run_world(seed, faults)
    assert all(tracked.ends == ["finished"] for tracked in world.router.requests.values())


@pytest.mark.parametrize("seed", range(40))
def test_C2_workers_that_crash_and_restart_at_their_address_leave_nothing_behind(seed: int) -> None:
    run_world(1000 + seed, Faults(crashes=8, max_delay_s=0.1, duplicated=0.1))


@pytest.mark.parametrize("seed", range(30))
def test_dying_links_cost_an_attempt_and_never_the_request(seed: int) -> None:
    world = run_world(2000 + seed, Faults(link_deaths=12, max_delay_s=0.2))
    assert all(tracked.ends == ["finished"] for tracked in world.router.requests.values())


@pytest.mark.parametrize("seed", range(40))
def test_A1_cancels_at_any_moment_give_all_blocks_back(seed: int) -> None:
    faults = Faults(cancels=8, lost=0.05, duplicated=0.1, max_delay_s=0.3)
    world = run_world(3000 + seed, faults)
    assert any(tracked.ends == ["cancelled"] for tracked in world.router.requests.values())


@pytest.mark.parametrize("seed", range(40))
def test_everything_at_once_ends_in_bounded_time(seed: int) -> None:
    faults = Faults(
        lost=0.1,
        duplicated=0.1,
        corrupt=0.01,
        max_delay_s=0.5,
        crashes=4,
        freezes=4,
        link_deaths=4,
        cancels=3,
        stale_targets=0.05,
    )
    run_world(4000 + seed, faults, num_blocks=60)


@pytest.mark.parametrize("seed", range(3))
def test_C7_256_concurrent_handoffs_in_random_order_all_complete(seed: int) -> None:
    faults = Faults(max_delay_s=0.2, duplicated=0.2)
    world = World(5000 + seed, faults, num_blocks=4096)
    for number in range(256):
        world.router.submit(f"r{number}", world.rng.randint(1, 300))
    world.run(60.0)
    world.check_quiet()
    assert all(tracked.ends == ["finished"] for tracked in world.router.requests.values())


def test_C8_half_an_hour_without_traffic_leaves_links_and_workers_as_they_were() -> None:
    world = World(8, Faults(), num_prefill=1, num_decode=1)
    world.router.submit("before", 200)
    world.run(30.0)
    (prefill,) = world.prefill
    (link,) = prefill.links.values()
    world.run(30.0 + 1800.0)
    world.check_quiet()
    world.router.submit("after", 200)
    world.run(30.0 + 1800.0 + 30.0)
    world.check_quiet()
    for tracked in world.router.requests.values():
        assert (tracked.ends, tracked.request.attempt) == (["finished"], 1)
        assert tracked.target is not None
        assert tracked.target.decode_attempt == 1
    assert list(prefill.links.values()) == [link]


@pytest.mark.parametrize("skew_s", [0.0, 600.0, 3600.0 * 24 * 365])
def test_C19_clocks_that_differ_neither_free_early_nor_keep_for_ever(skew_s: float) -> None:
    world = World(6, Faults(), skew_s=skew_s)
    for number in range(20):
        world.router.submit(f"r{number}", 200)
    world.run(3 * CONFIG.lease_s)
    world.check_quiet()
    assert all(tracked.request.attempt == 1 for tracked in world.router.requests.values())


@pytest.mark.soak
@pytest.mark.parametrize("batch", range(20))
def test_a_thousand_worlds_with_everything_at_once(batch: int) -> None:
    for seed in range(50):
        faults = Faults(
            lost=0.15,
            duplicated=0.15,
            corrupt=0.02,
            max_delay_s=0.5,
            crashes=5,
            freezes=4,
            link_deaths=6,
            cancels=4,
            stale_targets=0.05,
        )
        run_world(100_000 + 50 * batch + seed, faults, num_blocks=60)
