"""Which workers take a request: prefix affinity and least load, counted in KV blocks.

    filter   alive, not draining, not excluded, able to hold the request, of one compatibility group
    path     local, if a decode worker lacks only a few blocks; else prefill there, decode here
    score    prefill: blocks to compute + blocks queued;  decode: blocks to add + blocks active
    pick     the cheapest pair of one group; ties go to the worker picked longest ago

Both terms of a score have one unit, so affinity yields as soon as the queue in front of the cached
prefix is longer than the prefix is worth.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdserve.errors import NoWorker, TooLong
from pdserve.request import Incarnation, Role, WorkerId

Path = Literal["disaggregated", "local"]


# A tuple: it is compared and hashed several times per token, which costs a dataclass 0.5 us each.
class WorkerKey(NamedTuple):
    """One life of one worker: a restart is another key."""

    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """What the policy knows of a worker at the instant of choosing."""

    key: WorkerKey
    role: Role
    is_available: bool
    """Alive, heard of lately, and not draining."""
    compatibility_digest: bytes
    load_blocks: int
    """Blocks queued (prefill) or active (decode), those dispatched a moment ago included."""
    total_blocks: int
    last_picked: int
    """A counter that rises with each pick; smaller is longer ago."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a request asks for."""

    prompt_blocks: int
    """Blocks of all tokens to be in the cache when decoding begins."""
    growth_blocks: int
    """Blocks that its output may still need."""
    cached_blocks: Mapping[WorkerId, int]
    """Leading blocks that a worker probably has."""
    max_local_blocks: int = 0
    """Most uncached blocks that a decode worker may prefill itself; 0: always hand off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Workers for one attempt."""

    prefill: WorkerKey | None
    """None: the decode worker prefills by itself."""
    decode: WorkerKey
    path: Path
    cached_blocks: int
    """The prefix hit expected where the prompt is computed."""


def choose_pair(
    workers: Sequence[WorkerView],
    demand: Demand,
    excluded: Collection[WorkerKey] = (),
    *,
    has_prefill_pool: bool,
) -> Choice:
    """Chooses a prefill and a decode worker, or a decode worker alone without a prefill pool.

    Raises:
        NoWorker: no pair is available now.
        TooLong: no decode worker could ever hold the request.
    """
    usable = [worker for worker in workers if worker.is_available and worker.key not in excluded]
    decodes = _that_fit([worker for worker in usable if worker.role is Role.DECODE], demand)
    if not decodes:
        raise NoWorker("no decode worker is available")
    if not has_prefill_pool:
        best = _cheapest(decodes, demand)
        return _locally(best, demand)
    near = [one for one in decodes if _uncached(one, demand) <= demand.max_local_blocks]
    if near and demand.max_local_blocks:
        # A short rest costs decode less, in its own chunks, than two workers and a hand-off.
        return _locally(_cheapest(near, demand), demand)
    prefills = [worker for worker in usable if worker.role is Role.PREFILL]
    if not prefills:
        raise NoWorker("no prefill worker is available")
    pairs = []
    for digest in sorted({worker.compatibility_digest for worker in prefills}):
        group = [worker for worker in decodes if worker.compatibility_digest == digest]
        if group:
            side = [worker for worker in prefills if worker.compatibility_digest == digest]
            prefill, decode = _cheapest(side, demand), _cheapest(group, demand)
            # The score is a sum of one term per side, so the best of each side make the best pair.
            pairs.append((_cost(prefill, demand) + _cost(decode, demand), prefill, decode))
    if not pairs:
        raise NoWorker("no prefill worker has a compatible decode worker")
    _, prefill, decode = min(pairs, key=lambda pair: pair[0])
    return Choice(
        prefill=prefill.key,
        decode=decode.key,
        path="disaggregated",
        cached_blocks=_cached(prefill, demand),
    )


def choose_decode(
    workers: Sequence[WorkerView],
    demand: Demand,
    prefill_digest: bytes,
    excluded: Collection[WorkerKey] = (),
) -> WorkerKey:
    """Chooses another decode worker for KV that waits on a prefill worker.

    Raises:
        NoWorker: none is available now.
        TooLong: none could ever hold the request.
    """
    usable = [
        worker
        for worker in workers
        if worker.role is Role.DECODE
        and worker.is_available
        and worker.key not in excluded
        and worker.compatibility_digest == prefill_digest
    ]
    fitting = _that_fit(usable, demand)
    if not fitting:
        raise NoWorker("no decode worker is available")
    return _cheapest(fitting, demand).key


def _that_fit(workers: list[WorkerView], demand: Demand) -> list[WorkerView]:
    need = demand.prompt_blocks + demand.growth_blocks
    fitting = [worker for worker in workers if worker.total_blocks >= need]
    if workers and not fitting:
        largest = max(worker.total_blocks for worker in workers)
        raise TooLong("prompt", need, f"at most {largest} KV blocks with its output")
    return fitting


def _cached(worker: WorkerView, demand: Demand) -> int:
    return min(demand.cached_blocks.get(worker.key.worker_id, 0), demand.prompt_blocks)


def _uncached(worker: WorkerView, demand: Demand) -> int:
    return demand.prompt_blocks - _cached(worker, demand)


def _cost(worker: WorkerView, demand: Demand) -> int:
    return worker.load_blocks + _uncached(worker, demand)


def _locally(worker: WorkerView, demand: Demand) -> Choice:
    cached = _cached(worker, demand)
    return Choice(prefill=None, decode=worker.key, path="local", cached_blocks=cached)


def _cheapest(workers: Sequence[WorkerView], demand: Demand) -> WorkerView:
    return min(workers, key=lambda one: (_cost(one, demand), one.last_picked, one.key.worker_id))
