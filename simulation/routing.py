"""The router's brain in a simulation: the production fleet, load book, index and placer.

Only the policy may be another one, so that what is compared are choices and nothing else.
"""

from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from pdserve.cache.cached_granules import CachedGranules
from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile import Profile
from pdserve.request import RequestId, Role, WorkerId
from router.cost import LawTable
from router.fleet import Fleet, Member
from router.load_book import LoadBook
from router.placer import InProcessPlacer, PlaceQuery
from router.policy import Choice, JointPolicy, Policy
from router.prefix_index import GRANULE_TOKENS, PrefixIndex
from router.room import has_room
from router.worker_key import WorkerKey
from simulation.cache_feed import FLUSH_S, CacheFeed
from simulation.clock import EventQueue

PolicyMaker = Callable[[Fleet, LawTable], Policy]
_DIGEST = b"simulated"
_Result = TypeVar("_Result")


def make_joint_policy(fleet: Fleet, table: LawTable) -> Policy:
    """Makes the policy of production."""
    return JointPolicy(fleet, table)


class Brain:
    """Chooses workers, and is told what becomes of its choices."""

    def __init__(
        self,
        profiles: Iterable[Profile],
        queue: EventQueue,
        *,
        make_policy: PolicyMaker = make_joint_policy,
        max_local_tokens: int = 0,
        cache_events_s: float = FLUSH_S,
    ) -> None:
        """Knows no worker.

        Args:
            profiles: what the predictor starts from; none: choices count KV blocks.
            queue: virtual time.
            make_policy: what chooses.
            max_local_tokens: uncached tokens that a decode worker may prefill; 0: none.
            cache_events_s: from a change in a cache until it is known here.
        """
        self._fleet = Fleet()
        self._book = LoadBook(self._fleet, queue)
        self._index = PrefixIndex(clock=queue)
        self.caches = CacheFeed(self._index, queue, cache_events_s)
        self._table = LawTable(self._fleet, Predictor(profiles))
        self._clock = queue
        policy = make_policy(self._fleet, self._table)
        self._placer = InProcessPlacer(policy, self._book, self._index, queue, max_local_tokens)

    def join(self, worker: WorkerKey, role: Role, profile: Profile) -> CachedGranules:
        """A worker takes requests from now on; returns what it tells its cache's changes."""
        member = Member(
            key=worker,
            role=role,
            digest=_DIGEST,
            worker_class=profile.worker_class,
            total_blocks=profile.kv_tokens // profile.block_size,
            block_size=profile.block_size,
            max_num_seqs=profile.max_num_seqs,
            chunk_tokens=profile.max_num_batched_tokens,
            kv_bytes_per_token=profile.kv_bytes_per_token,
        )
        self._fleet.join(member)
        self._fleet.set_available(worker, is_available=True)
        return self.caches.follow(worker.worker_id)

    def drain(self, worker: WorkerKey) -> None:
        """A worker takes nothing new."""
        self._fleet.set_available(worker, is_available=False)

    def leave(self, worker: WorkerKey) -> None:
        """A worker is gone, and all that it held."""
        if self._fleet.row_of_id(worker.worker_id) == self._fleet.row_of(worker):
            # Else its next life is here already.
            self.caches.leave(worker.worker_id)
        self._placer.forget(worker)
        self._fleet.leave(worker)

    @property
    def on_room(self) -> Callable[[], None]:
        """Called when a prompt has left a worker's queue."""
        return self._book.on_room

    @on_room.setter
    def on_room(self, call: Callable[[], None]) -> None:
        self._book.on_room = call

    def has_room(self, role: Role) -> bool:
        """Says whether a worker of a pool would soon be idle."""
        return has_room(self._fleet, role, self._clock.now())

    def drain_s(self, num_tokens: float, role: Role) -> float | None:
        """Returns how long a pool takes for so many tokens; None while nothing is predicted."""
        return self._table.drain_s(num_tokens, role, self._clock.now())

    def believed_cached(self, granules: Sequence[int]) -> dict[WorkerId, int]:
        """Returns how many tokens of a prompt each worker has, by what the index was told."""
        matches = self._index.match(granules)
        return {worker_id: count * GRANULE_TOKENS for worker_id, count in matches.items()}

    def expect_uncached(self, query: PlaceQuery) -> int:
        """Returns what the worker with the longest prefix has not."""
        cached = max(self.believed_cached(query.granules).values(), default=0)
        return max(query.num_tokens - cached, 1)

    def place(self, query: PlaceQuery) -> Choice:
        """Chooses and charges workers for a new attempt.

        Raises:
            NoWorker: none now.
            TooLong: none ever.
        """
        return _run(self._placer.place(query))

    def place_decode(self, query: PlaceQuery, prefill: WorkerKey) -> WorkerKey:
        """Chooses and charges another decode worker for KV held by `prefill`; raises as `place`."""
        return _run(self._placer.place_decode(query, prefill)).decode

    def finish_prefill(self, request_id: RequestId, worker: WorkerKey) -> None:
        """A prompt is computed."""
        self._book.finish_prefill(request_id, worker)

    def keep_only(self, request_id: RequestId, workers: Collection[WorkerKey]) -> None:
        """Only these still work for a request."""
        self._book.keep_only(request_id, workers)

    def note_output(self, num_tokens: int) -> None:
        """An output has ended."""
        self._placer.note_output(num_tokens)


def _run(call: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a call of the placer's in-process twin, which awaits nothing."""
    try:
        call.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    call.close()
    raise AssertionError("the in-process placer waited for something")
