"""What the router's prefix index costs: memory a pair, look-ups, events, at 1,000 workers.

`python -m benchmarks.prefix_index [PAIRS ...]`: sizes in pairs, 1,000,000 and 16,000,000 without;
a result file for each.
Nothing but the index runs here: no sockets, one thread, and it is the time of that thread which is
told. Keys are random, as those of SHA-256 are.
"""

import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.report import Row, write
from pdserve.cache.block_hash import HashChain
from pdserve.cache.block_pool import BlockPool
from pdserve.cache.cache_events import MAX_PIECE
from pdserve.cache.cached_granules import CachedGranules
from pdserve.cache.granule_hash import GRANULE_TOKENS, hash_granules
from pdserve.cache.prefix_cache import PrefixCache
from pdserve.request import Incarnation, WorkerId
from pdserve.rpc.v1 import worker_pb2
from router.cache_feed import CacheFeed
from router.event_queue import MAX_BATCH, EventQueue
from router.granule_table import Keys
from router.prefix_index import PrefixIndex

NUM_WORKERS = 1000
WORKERS = [WorkerId(f"worker-{number}") for number in range(NUM_WORKERS)]
PROMPT_GRANULES = 131_072 // GRANULE_TOKENS
BLOCK_SIZE, CHAIN_TOKENS, NUM_CHAINS = 16, 32_768, 8
BATCH = 8192
BATCH_WORKERS = 16
NUM_LOOKUPS = 1000
NUM_ROUNDS = 20
NUM_PROMPTS = 40
NUM_STEADY_BATCHES = 100
SIZES = (1_000_000, 16_000_000)
WORKLOAD = (
    f"{NUM_WORKERS} workers; events in batches of {BATCH} from {BATCH_WORKERS} of them; prompts of "
    f"{PROMPT_GRANULES} granules of {GRANULE_TOKENS} tokens, keys as routers have them; time of "
    f"the thread itself, others used the machine; look-ups: median of the calmest of {NUM_ROUNDS} "
    "rounds"
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
        start_s = time.thread_time()
        self.index.apply(workers, keys, removed)
        self.seconds.append(time.thread_time() - start_s)


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
            bound=1e6,
            better="higher",
        ),
        Row(
            name=f"longest batch while the index grows, {size}",
            value=max(fill_s) * 1000,
            unit="ms",
            bound=20,
            details={"batch_ms_p50_p99": [float(np.percentile(fill_s, q)) * 1e3 for q in (50, 99)]},
        ),
        _measure_steady(filler, size),
    ]
    return rows + _measure_lookups(filler, size) + [_measure_removal(filler, size)]


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


def _measure_removal(filler: Filler, size: str) -> Row:
    """Every hundredth worker is lost at once."""
    index = filler.index
    for worker_id in WORKERS[::100]:
        index.forget(worker_id)
    pairs, turns = len(index), [0.0]
    start_s = time.thread_time()
    while index.sweep():
        turns.append(time.thread_time() - start_s - sum(turns))
    return Row(
        name=f"longest turn of the removal of ten workers, {size}",
        value=max(turns) * 1e3,
        unit="ms",
        bound=20,
        details={"turns": len(turns), "seconds": sum(turns), "pairs": pairs - len(index)},
    )


_CUTS = (50, 99, 100)


Prompts = list[Keys]
Holders = list[tuple[WorkerId, int | Keys]]
"""Workers, and how many leading granules of a prompt each has, or which ones."""


def _measure_lookups(filler: Filler, size: str) -> list[Row]:
    random = np.random.default_rng(3)
    fresh = [filler.keys(PROMPT_GRANULES) for _ in range(NUM_PROMPTS)]
    cases: list[tuple[str, Prompts]] = [("known to nobody", fresh)]
    for count, number in ((1, 40), (2, 40), (4, 40), (8, 40), (16, 40), (40, 4), (NUM_WORKERS, 1)):
        chosen = [random.choice(NUM_WORKERS, count, replace=False) for _ in range(number)]
        holders = [[(WORKERS[each], PROMPT_GRANULES) for each in some] for some in chosen]
        name = f"whole at {count} worker{'s' if count > 1 else ''}"
        cases.append((name, [_tell_prompt(filler, each) for each in holders]))
    every = range(NUM_WORKERS)
    head, five = (
        [(WORKERS[each], 1) for each in every],
        [(WORKERS[each], 1024) for each in range(5)],
    )
    ends = (10, 100, 500, PROMPT_GRANULES)
    kinds: list[tuple[str, Holders]] = [
        ("at all workers, each as far as no other", [(WORKERS[n], n + 1) for n in every]),
        ("at all workers, in fours as far", [(WORKERS[n], n // 4 * 4 + 1) for n in every]),
        ("at all workers, a quarter as far each", [(WORKERS[n], ends[n % 4]) for n in every]),
        ("its head at all workers, whole at five", [*head[5:], *five]),
        (
            "at all workers, each without any tenth granule",
            [(WORKERS[n], np.flatnonzero(random.random(PROMPT_GRANULES) < 0.9)) for n in every],
        ),
    ]
    cases += [(name, [_tell_prompt(filler, each)]) for name, each in kinds]
    rows = [_time_lookups(filler.index, f"{name}, {size}", prompts) for name, prompts in cases]
    hinted = cases[2][1]
    for prompt in fresh:
        filler.index.add(WORKERS[9], prompt.tolist())
    name = f"whole at 2 workers, {NUM_PROMPTS * PROMPT_GRANULES:,} other hints, {size}"
    return [*rows, _time_lookups(filler.index, name, hinted)]


def _time_lookups(index: PrefixIndex, name: str, prompts: Prompts) -> Row:
    # As the router has them.
    asked = [array("Q", keys.tolist()) for keys in prompts]
    # Never the same object twice: the index would remember its last answer.
    fresh = [asked[i % len(asked)][:] for i in range(NUM_LOOKUPS)]
    milliseconds = _time(index.match_rows, fresh) * 1e3
    rounds = np.median(milliseconds.reshape(NUM_ROUNDS, -1), axis=1)
    p50, p99 = np.percentile(milliseconds, (50, 99)).tolist()
    return Row(
        name=f"look-up of 131,072 tokens {name}",
        value=float(rounds.min()),
        unit="ms",
        bound=0.3,
        details={"p50_ms": p50, "p99_ms": p99},
    )


def _tell_prompt(filler: Filler, holders: Holders) -> Keys:
    """Returns a new prompt that workers tell to have."""
    prompt = filler.keys(PROMPT_GRANULES)
    for worker_id, what in holders:
        _tell(filler.index, [worker_id], prompt[:what] if isinstance(what, int) else prompt[what])
    return prompt


def _tell(index: PrefixIndex, workers: Sequence[WorkerId], keys: Keys) -> None:
    index.apply(workers, [keys] * len(workers), [np.zeros(len(keys), np.bool_)] * len(workers))


def _time(call: Callable[[Sequence[int]], object], arguments: Sequence[Sequence[int]]) -> Keys:
    seconds = np.zeros(len(arguments))
    for number, argument in enumerate(arguments):
        start_s = time.thread_time()
        call(argument)
        seconds[number] = time.thread_time() - start_s
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
    start_s = time.thread_time()
    for feed, data in zip(feeds, batches, strict=True):
        feed.take(worker_pb2.CacheBatch.FromString(data))
    parse_s = time.thread_time() - start_s
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


def measure_snapshots(num_pairs: int) -> list[Row]:
    """Returns how long a new router takes to know what 1,000 workers have, which all tell at once.

    The streams are read in turn, as the router does it; a turn of the event loop ends with a batch.
    """
    index = PrefixIndex()
    queue = EventQueue(index)
    random = np.random.default_rng(5)
    feeds = [CacheFeed(queue, worker_id, Incarnation(1)) for worker_id in WORKERS]
    each = num_pairs // NUM_WORKERS
    turns: list[float] = []
    for part in range(-(-each // MAX_PIECE)):
        size = min(MAX_PIECE, each - part * MAX_PIECE)
        for feed in feeds:
            keys = random.integers(1, 1 << 64, size, np.uint64).tolist()
            batch = worker_pb2.CacheBatch(epoch=1, first_sequence=1, keys=keys)
            batch.snapshot.index = part
            batch.snapshot.is_last = (part + 1) * MAX_PIECE >= each
            data = batch.SerializeToString()
            start_s = time.thread_time()
            feed.take(worker_pb2.CacheBatch.FromString(data))
            if queue.num_waiting > MAX_BATCH - MAX_PIECE:
                queue.flush()
                index.sweep()
            turns.append(time.thread_time() - start_s)
    while queue.num_waiting:
        queue.flush()
    size_name = f"{num_pairs // 1_000_000}M pairs"
    return [
        Row(
            name=f"snapshots of 1,000 workers taken by a new router, {size_name}",
            value=sum(turns),
            unit="s",
            details={"pairs": len(index), "pairs_per_s": len(index) / sum(turns)},
        ),
        Row(
            name=f"longest turn while it takes them, {size_name}",
            value=max(turns) * 1e3,
            unit="ms",
            bound=20,
            details={"p99_ms": float(np.percentile(turns, 99)) * 1e3},
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
        rows = measure(size) + measure_snapshots(size)
        if size == SIZES[0]:
            rows = measure_memory() + measure_messages() + measure_engine() + rows
        write(f"prefix_index_{size // 1_000_000}M", WORKLOAD, rows)


if __name__ == "__main__":
    main()
