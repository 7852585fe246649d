"""What one worker says of its cache, over a network that loses, repeats and delays it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cache.cache_events import CacheEventLog
from pdserve.cache.cached_granules import GranuleChange
from pdserve.face.cache_streams import encode_piece
from pdserve.request import Incarnation, WorkerId
from pdserve.rpc.v1 import worker_pb2
from router.cache_feed import CacheFeed, Taken
from router.event_queue import EventQueue
from router.prefix_index import PrefixIndex

A = WorkerId("a")


class World:
    """One worker, and a network that loses, repeats and delays what it says to one router."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.queue = EventQueue(self.index)
        self.held: set[int] = set()
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.held.clear()
        self.log = CacheEventLog(8)
        self.queue.discard(A)
        self.index.forget(A)
        self.feed = CacheFeed(self.queue, A, Incarnation(self.epoch))
        self.subscribe()

    def restart_router(self) -> None:
        self.index = PrefixIndex()
        self.queue = EventQueue(self.index)
        self.feed = CacheFeed(self.queue, A, Incarnation(self.epoch))
        self.subscribe()

    def change(self, keys: list[int]) -> None:
        changes = [GranuleChange(key, key in self.held) for key in dict.fromkeys(keys)]
        self.held ^= set(keys)
        self.log.append(changes)

    def clear(self) -> None:
        self.held.clear()
        self.log.clear()

    def subscribe(self) -> None:
        self.position = self.feed.next_sequence

    def send(self) -> list[worker_pb2.CacheBatch]:
        """Returns what the worker says next."""
        if self.log.has(self.position):
            pieces = [self.log.read(self.position, 3)]
            self.position += len(pieces[0].keys)
        else:
            pieces = list(self.log.snapshot(3))
            self.position = pieces[0].first_sequence
        return [encode_piece(Incarnation(self.epoch), piece) for piece in pieces]

    def deliver(self, batches: list[worker_pb2.CacheBatch]) -> None:
        for batch in batches:
            if self.feed.take(batch) is not Taken.FOLLOWED:
                self.subscribe()
            self.queue.flush()

    def settle(self) -> None:
        """Lets the network behave."""
        self.subscribe()
        for _ in range(60):
            self.deliver(self.send())
        while self.queue.num_waiting:
            self.queue.flush()


_FATES = st.sampled_from(["pass", "pass", "drop", "repeat", "reorder", "keep"])
_MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.lists(st.integers(1, 15), min_size=1, max_size=6)),
        st.tuples(st.just("send"), _FATES),
        st.tuples(st.sampled_from(["restart", "restart_router", "clear", "late"]), st.none()),
    ),
    max_size=50,
)


@settings(max_examples=60)
@given(_MOVES)
def test_C12_after_losses_repeats_and_restarts_the_index_is_what_the_worker_holds(moves):
    world = World()
    kept: list[worker_pb2.CacheBatch] = []
    for what, detail in moves:
        if what == "change":
            world.change(detail)
        elif what == "send":
            batches = world.send()
            if detail == "keep":
                kept += batches
            elif detail == "reorder":
                world.deliver(batches[::-1])
            elif detail != "drop":
                world.deliver(batches * (2 if detail == "repeat" else 1))
        elif what == "late":
            world.deliver(kept)
        else:
            faults = {
                "restart": world.restart,
                "restart_router": world.restart_router,
                "clear": world.clear,
            }
            faults[what]()
    world.settle()
    for key in range(1, 16):
        assert world.index.match([key]) == ({A: 1} if key in world.held else {})


def test_C12_a_gap_is_told_and_filled_from_where_it_began():
    world = World()
    world.settle()
    world.change([1])
    world.send()
    world.change([2])
    (late,) = world.send()
    assert world.feed.take(late) is Taken.GAP
    world.settle()
    assert world.index.match([1]) == world.index.match([2]) == {A: 1}
    assert world.feed.next_sequence == 3


def test_C12_a_snapshot_without_one_of_its_parts_is_not_taken_for_whole():
    world = World()
    world.change(list(range(1, 9)))
    world.position = 0
    first, _, last = world.send()
    assert world.feed.take(first) is Taken.FOLLOWED
    assert world.feed.take(last) is Taken.GAP
    assert world.feed.next_sequence == 0


def test_a_message_of_another_life_is_refused():
    world = World()
    batch = worker_pb2.CacheBatch(epoch=99, first_sequence=1, keys=[1])
    assert world.feed.take(batch) is Taken.WRONG_EPOCH
