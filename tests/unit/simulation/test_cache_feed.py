from pdserve.predictor.profile import Profile
from pdserve.request import BlockId, Incarnation, RequestId, Role, WorkerId
from router.placer import PlaceQuery
from router.worker_key import WorkerKey
from simulation.cache_feed import FLUSH_S
from simulation.clock import EventQueue
from simulation.routing import Brain

PROFILE = Profile(
    worker_class="toy",
    prefill=(0.004, 2e-5, 1e-9),
    decode=(0.004, 2e-5, 3e-8),
    transfer=(0.001, 2e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=64_000,
)


def key(name: str) -> WorkerKey:
    return WorkerKey(WorkerId(name), Incarnation(1))


def query(*granules: int) -> PlaceQuery:
    return PlaceQuery(
        request_id=RequestId("r"), num_tokens=1000, num_growth_tokens=10, granules=granules
    )


def test_the_index_learns_what_a_cache_holds_and_what_it_evicts() -> None:
    queue = EventQueue()
    brain = Brain([PROFILE], queue)
    cache = brain.join(key("p"), Role.PREFILL, PROFILE)
    cache.add(11, None, (BlockId(0),))
    cache.add(12, 11, (BlockId(1),))
    brain.caches.wake()
    queue.run(FLUSH_S / 2)
    assert brain.expect_uncached(query(11, 12)) == 1000
    queue.run()
    assert brain.expect_uncached(query(11, 12)) == 1000 - 256
    cache.evict([BlockId(1)])
    brain.caches.wake()
    queue.run()
    assert brain.expect_uncached(query(11, 12)) == 1000 - 128


def test_a_worker_that_left_is_forgotten_with_what_it_told_last() -> None:
    queue = EventQueue()
    brain = Brain([PROFILE], queue)
    cache = brain.join(key("p"), Role.PREFILL, PROFILE)
    cache.add(11, None, (BlockId(0),))
    brain.caches.wake()
    brain.leave(key("p"))
    queue.run()
    assert brain.expect_uncached(query(11)) == 1000
