"""What the router's prefix index costs: memory a pair, look-ups, events, at 1,000 workers.

`python -m benchmarks.prefix_index [PAIRS ...]`: sizes in pairs, 1,000,000 and 16,000,000 without;
a result file for each.
Nothing but the index runs here: no sockets, one thread. Keys are random, as those of SHA-256 are.
"""

import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.report import Row, write
from pdserve.cache.block_hash import HashChain
from pdserve.cache.block_pool import BlockPool
from pdserve.cache.cached_granules import CachedGranules
from pdserve.cache.granule_hash import GRANULE_TOKENS, hash_granules
from pdserve.cache.prefix_cache import PrefixCache
from pdserve.request import Incarnation, WorkerId
from pdserve.rpc.v1 import worker_pb2
from router.cache_feed import CacheFeed
from router.event_queue import EventQueue
from router.granule_table import Keys
from router.prefix_index import PrefixIndex

NUM_WORKERS = 1000
WORKERS = [WorkerId(f"worker-{number}") for number in range(NUM_WORKERS)]
PROMPT_GRANULES = 131_072 // GRANULE_TOKENS
BLOCK_SIZE, CHAIN_TOKENS, NUM_CHAINS = 16, 32_768, 8
BATCH = 8192
BATCH_WORKERS = 16
NUM_LOOKUPS = 400
NUM_STEADY_BATCHES = 100
SIZES = (1_000_000, 16_000_000)
WORKLOAD = (
    f"{NUM_WORKERS} workers; events in batches of {BATCH} from {BATCH_WORKERS} of them; prompts of "
    f"{PROMPT_GRANULES} granules of {GRANULE_TOKENS} tokens, keys given as a tuple of ints"
)


class Filler:
    """Tells an index of random granules, and times each batch."""

    def __init__(self, num_holders: int = 1) -> None:
        """Each granule comes to so many workers, chosen at random."""
        self.index = PrefixIndex()
        self._random = np.random.default_rng(7)
        self._num_holders = num_holders
        self.seconds: list[float] = []
        self.batches: list[tuple[list[WorkerId], list[Keys]]] = []
        for worker_id in WORKERS:
            self.index.begin_snapshot(worker_id)

    def keys(self, count: int) -> Keys:
        return self._random.integers(1, 1 << 64, count, np.uint64)

    def fill(self, num_pairs: int, *, keep: int = 0) -> None:
        """Adds pairs, and remembers the last batches."""
        while len(self.index) < num_pairs:
            keys = self.keys(BATCH // self._num_holders)
            parts = np.array_split(np.tile(keys, self._num_holders), BATCH_WORKERS)
            chosen = self._random.choice(NUM_WORKERS, BATCH_WORKERS, replace=False)
            batch = [WORKERS[each] for each in chosen], parts
            self.apply(*batch, is_removed=False)
            self.batches = [*self.batches, batch][-keep:] if keep else []

    def apply(self, workers: list[WorkerId], keys: list[Keys], *, is_removed: bool) -> None:
        removed = [np.full(len(each), is_removed) for each in keys]
        start_s = time.perf_counter()
        self.index.apply(workers, keys, removed)
        self.seconds.append(time.perf_counter() - start_s)


def measure(num_pairs: int) -> list[Row]:
    """Returns all rows of one size."""
    filler = Filler()
    filler.fill(num_pairs, keep=NUM_STEADY_BATCHES)
    fill_s = list(filler.seconds)
    size = f"{num_pairs // 1_000_000}M pairs"
    rows = [
        Row(
            name=f"memory, every granule at one worker, {size}",
            value=filler.index.num_bytes / len(filler.index),
            unit="bytes/pair",
            bound=20,
        ),
        Row(
            name=f"events while the index grows, {size}",
            value=len(fill_s) * BATCH / sum(fill_s),
            unit="1/s",
            details={"longest_batch_ms": max(fill_s) * 1000},
        ),
        _measure_steady(filler, size),
    ]
    return rows + _measure_lookups(filler, size)


def _measure_steady(filler: Filler, size: str) -> Row:
    """Full caches: what comes in pushes something out."""
    filler.seconds.clear()
    batches = filler.batches
    for workers, keys in batches:
        filler.apply(workers, keys, is_removed=True)
    for workers, keys in batches:
        filler.apply(workers, keys, is_removed=False)
    milliseconds = np.array(filler.seconds) * 1000
    return Row(
        name=f"events, half of them evictions, {size}",
        value=len(filler.seconds) * BATCH / sum(filler.seconds),
        unit="1/s",
        bound=1e6,
        better="higher",
        details={"batch_ms_p50_p99_max": [float(np.percentile(milliseconds, q)) for q in _CUTS]},
    )


_CUTS = (50, 99, 100)


def _measure_lookups(filler: Filler, size: str) -> list[Row]:
    index = filler.index
    known = [filler.keys(PROMPT_GRANULES) for _ in range(40)]
    for keys in known:
        _tell(index, [WORKERS[number] for number in (3, 700)], keys)
    stairs, everybody = filler.keys(PROMPT_GRANULES), filler.keys(PROMPT_GRANULES)
    for number, worker_id in enumerate(WORKERS):
        _tell(index, [worker_id], stairs[: number + 1])
    for worker_id in WORKERS:
        _tell(index, [worker_id], everybody)
    cases: list[tuple[str, list[Keys]]] = [
        ("known to nobody", [filler.keys(PROMPT_GRANULES) for _ in range(40)]),
        ("whole at two workers", known),
        ("whole at all workers", [everybody]),
        ("at all workers, each as far as no other", [stairs]),
    ]
    rows = []
    for name, prompts in cases:
        # As the router has them.
        asked = [keys.tolist() for keys in prompts]
        # Never the same object twice: the index would remember its last answer.
        fresh = [tuple(asked[i % len(asked)]) for i in range(NUM_LOOKUPS)]
        seconds = _time(index.match_rows, fresh)
        rows.append(
            Row(
                name=f"look-up of 131,072 tokens {name}, {size}",
                value=float(np.percentile(seconds, 50)) * 1e3,
                unit="ms",
                bound=0.3,
                details={"p99_ms": float(np.percentile(seconds, 99)) * 1e3},
            )
        )
    return rows


def _tell(index: PrefixIndex, workers: Sequence[WorkerId], keys: Keys) -> None:
    index.apply(workers, [keys] * len(workers), [np.zeros(len(keys), np.bool_)] * len(workers))


def _time(call: Callable[[tuple[int, ...]], object], arguments: list[tuple[int, ...]]) -> Keys:
    seconds = np.zeros(len(arguments))
    for number, argument in enumerate(arguments):
        start_s = time.perf_counter()
        call(argument)
        seconds[number] = time.perf_counter() - start_s
    return seconds


def measure_memory() -> list[Row]:
    """Returns the memory of a million pairs of several kinds, and at the worst size."""
    rows = []
    for num_holders in (1, 2, 3, 8):
        filler = Filler(num_holders)
        worst = 0.0
        while len(filler.index) < 1_000_000:
            filler.fill(len(filler.index) + 50_000)
            worst = max(worst, filler.index.num_bytes / len(filler.index))
        rows.append(
            Row(
                name=f"memory at the worst size up to 1M pairs, {num_holders} holders a granule",
                value=worst,
                unit="bytes/pair",
                bound=20,
            )
        )
    tracemalloc.start()
    filler = Filler()
    filler.fill(1_000_000)
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    rows.append(
        Row(
            name="memory by tracemalloc, everything included, 1M pairs",
            value=traced / len(filler.index),
            unit="bytes/pair",
            bound=20,
        )
    )
    return rows


def measure_messages() -> list[Row]:
    """Returns what taking messages of the wire adds, and hashing as the scale of it all."""
    filler = Filler()
    queue = EventQueue(filler.index)
    messages, size = 200, 512
    feeds = [CacheFeed(queue, WORKERS[number], Incarnation(1)) for number in range(messages)]
    batches = []
    for feed in feeds:
        snapshot = worker_pb2.CacheBatch(epoch=1, first_sequence=1)
        snapshot.snapshot.is_last = True
        feed.take(snapshot)
        batch = worker_pb2.CacheBatch(epoch=1, first_sequence=1, keys=filler.keys(size).tolist())
        batches.append(batch.SerializeToString())
    start_s = time.perf_counter()
    for feed, data in zip(feeds, batches, strict=True):
        feed.take(worker_pb2.CacheBatch.FromString(data))
    parse_s = time.perf_counter() - start_s
    tokens = list(range(131_072))
    hash_s = _time(lambda _: hash_granules(tokens), [()] * 20)
    return [
        Row(
            name=f"messages of {size} events parsed and put in order",
            value=messages * size / parse_s,
            unit="events/s",
        ),
        Row(
            name="hashing 131,072 tokens",
            value=float(np.percentile(hash_s, 50)) * 1e3,
            unit="ms",
        ),
    ]


def measure_engine() -> list[Row]:
    """Returns what the events cost the thread of a worker's engine, a granule that comes and goes.

    A decode step makes a granule once in 128 steps of a sequence.
    """
    spent_s = {
        is_told: min(_time_cache(is_told=is_told) for _ in range(5)) for is_told in (False, True)
    }
    num_granules = NUM_CHAINS * CHAIN_TOKENS // GRANULE_TOKENS
    return [
        Row(
            name="engine thread, a granule stored and evicted",
            value=(spent_s[True] - spent_s[False]) / num_granules * 1e6,
            unit="us",
            details={"cache_alone_us": spent_s[False] / num_granules * 1e6},
        )
    ]


def _time_cache(*, is_told: bool) -> float:
    """Returns the seconds of entering sequences as they are decoded, each pushing out another."""
    num_blocks = CHAIN_TOKENS // BLOCK_SIZE
    cache, granules = PrefixCache(BlockPool(num_blocks)), CachedGranules()
    if is_told:
        cache.tell(granules)
    chains = [
        HashChain([number, *range(CHAIN_TOKENS - 1)], BLOCK_SIZE, b"", "r")
        for number in range(NUM_CHAINS)
    ]
    start_s = time.thread_time()
    for chain in chains:
        table = cache.open(cache.find(chain, num_blocks), num_blocks)
        for end in range(BLOCK_SIZE, CHAIN_TOKENS + 1, BLOCK_SIZE):
            cache.enter(table, chain, end)
        cache.close(table)
        granules.take_changes()
    return time.thread_time() - start_s


def main() -> None:
    for size in [int(argument) for argument in sys.argv[1:]] or SIZES:
        rows = measure(size)
        if size == SIZES[0]:
            rows = measure_memory() + measure_messages() + measure_engine() + rows
        write(f"prefix_index_{size // 1_000_000}M", WORKLOAD, rows)


if __name__ == "__main__":
    main()
