import asyncio
from array import array

from pdserve.cache.cache_events import CacheEventLog
from pdserve.face.cache_streams import CacheStreams
from pdserve.request import Incarnation
from pdserve.rpc.v1 import rank_pb2, worker_pb2
from tests.support.router_harness import let_others_run

EPOCH = Incarnation(5)


def _streams(max_events: int = 64) -> CacheStreams:
    return CacheStreams(EPOCH, CacheEventLog(max_events), pause_s=0.0)


def _changes(*keys: int, is_removed: bool = False) -> rank_pb2.CacheChanges:
    flags = bytes([is_removed]) * len(keys)
    return rank_pb2.CacheChanges(keys=array("Q", keys).tobytes(), is_removed=flags)


def _request(next_sequence: int = 0, epoch: int = EPOCH) -> worker_pb2.WatchCacheRequest:
    return worker_pb2.WatchCacheRequest(epoch=epoch, next_sequence=next_sequence)


async def test_a_new_front_gets_a_snapshot_and_then_events():
    streams = _streams()
    streams.publish(_changes(1, 2))
    batches = streams.serve(_request())
    first = await anext(batches)
    assert (list(first.keys), first.snapshot.is_last, first.first_sequence) == ([1, 2], True, 3)
    waiting = asyncio.ensure_future(anext(batches))
    await let_others_run(2)
    assert not waiting.done()
    streams.publish(_changes(2, is_removed=True))
    second = await waiting
    assert (list(second.keys), second.is_removed) == ([2], b"\x01")
    assert (second.first_sequence, second.HasField("snapshot")) == (3, False)
    await batches.aclose()


async def test_a_front_that_was_away_for_a_moment_goes_on():
    streams = _streams()
    streams.publish(_changes(1, 2, 3))
    batches = streams.serve(_request(2))
    batch = await anext(batches)
    assert (list(batch.keys), batch.HasField("snapshot")) == ([2, 3], False)
    await batches.aclose()


async def test_a_front_of_another_life_begins_anew():
    streams = _streams()
    streams.publish(_changes(1, 2, 3))
    batches = streams.serve(_request(2, epoch=4))
    assert (await anext(batches)).HasField("snapshot")
    await batches.aclose()


async def test_a_front_that_reads_too_slowly_gets_a_snapshot_instead_of_what_it_missed():
    streams = _streams(max_events=4)
    streams.publish(_changes(1))
    slow, quick = streams.serve(_request()), streams.serve(_request())
    for batches in (slow, quick):
        await anext(batches)
    for key in range(2, 12):
        streams.publish(_changes(key))
        assert list((await anext(quick)).keys) == [key]
    batch = await anext(slow)
    assert batch.HasField("snapshot")
    assert list(batch.keys) == list(range(1, 12))
    await slow.aclose()
    await quick.aclose()


async def test_events_come_together_once_a_front_is_up_to_date():
    streams = _streams()
    batches = streams.serve(_request())
    await anext(batches)
    streams.publish(_changes(1))
    await anext(batches)
    for key in (2, 3, 4):
        streams.publish(_changes(key))
    assert list((await anext(batches)).keys) == [2, 3, 4]
    await batches.aclose()
