"""One suite over every registry, and what only Redis can do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from launcher.redis_server import RedisServer
from pdserve.registry.base import Registry, RegistryUnavailable, StageRecord
from pdserve.registry.memory import MemoryRegistry
from pdserve.registry.redis import RedisRegistry, decode_record, encode_record, heed_cancel
from pdserve.request import Incarnation, WorkerId
from pdserve.timeline import ManualClock
from tests.support.records import make_record

RECORD = make_record(
    incarnation=Incarnation(2**64 - 1), compatibility_digest=bytes(range(32)), rank_pids=(12, 13)
)

STAGE = StageRecord(
    worker_id=WorkerId("decode-0"),
    stage=1,
    incarnation=Incarnation(2**64 - 3),
    address="10.0.0.2:7100",
)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[RedisRegistry]:
    if not redis_server.is_running():
        redis_server.start()
    async with Redis.from_url(redis_server.url) as client:
        await client.flushall()
    async with RedisRegistry(redis_server.url, "test", timeout_s=1.0) as registry:
        yield registry


@pytest.fixture(params=["memory", "redis"])
def registry(request: pytest.FixtureRequest) -> Registry:
    if request.param == "memory":
        return MemoryRegistry(ManualClock())
    found: Registry = request.getfixturevalue("redis")
    return found


async def test_registered_worker_is_listed_as_it_was(registry: Registry) -> None:
    await registry.register(RECORD, 10.0)
    assert await registry.list_workers() == (RECORD,)


async def test_empty_registry_lists_nothing(registry: Registry) -> None:
    assert await registry.list_workers() == ()


async def test_workers_are_sorted_by_id(registry: Registry) -> None:
    for name in ("c", "a", "b"):
        await registry.register(replace(RECORD, worker_id=WorkerId(name)), 10.0)
    assert [record.worker_id for record in await registry.list_workers()] == ["a", "b", "c"]


async def test_renewal_replaces_the_record(registry: Registry) -> None:
    await registry.register(RECORD, 10.0)
    draining = replace(RECORD, state="draining")
    await registry.register(draining, 10.0)
    assert await registry.list_workers() == (draining,)


async def test_deregistered_worker_is_gone(registry: Registry) -> None:
    await registry.register(RECORD, 10.0)
    await registry.deregister(RECORD.worker_id, RECORD.incarnation)
    assert await registry.list_workers() == ()


async def test_C2_old_incarnation_cannot_remove_its_successor(registry: Registry) -> None:
    await registry.register(RECORD, 10.0)
    # A neighbour that a double cannot tell from it.
    await registry.deregister(RECORD.worker_id, Incarnation(RECORD.incarnation - 1))
    assert await registry.list_workers() == (RECORD,)


async def test_deregistering_an_unknown_worker_does_nothing(registry: Registry) -> None:
    await registry.deregister(WorkerId("ghost"), Incarnation(1))
    assert await registry.list_workers() == ()


async def test_lease_ends_in_memory_by_the_clock() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    await registry.register(RECORD, 3.0)
    clock.advance(2.9)
    assert await registry.list_workers() == (RECORD,)
    clock.advance(0.2)
    assert await registry.list_workers() == ()


async def test_memory_registry_that_is_off_raises() -> None:
    registry = MemoryRegistry(ManualClock())
    registry.is_available = False
    with pytest.raises(RegistryUnavailable):
        await registry.list_workers()


async def test_redis_itself_ends_the_lease(redis: RedisRegistry, redis_server: RedisServer) -> None:
    await redis.register(RECORD, 3.0)
    async with Redis.from_url(redis_server.url) as client:
        assert 2000 < await client.pttl("pdserve:test:worker:decode-0") <= 3000


async def test_clusters_do_not_see_each_other(
    redis: RedisRegistry, redis_server: RedisServer
) -> None:
    await redis.register(RECORD, 10.0)
    async with RedisRegistry(redis_server.url, "te*") as other:
        assert await other.list_workers() == ()


async def test_unreadable_record_is_skipped(
    redis: RedisRegistry, redis_server: RedisServer
) -> None:
    await redis.register(RECORD, 10.0)
    bad_state = encode_record(RECORD).replace(b'"ready"', b'"asleep"')
    bad = (b"not json", b"[]", b"{}", bad_state, b"\x80\x04K\x01.")
    async with Redis.from_url(redis_server.url) as client:
        for index, value in enumerate(bad):
            await client.set(f"pdserve:test:worker:bad{index}", value)
    assert await redis.list_workers() == (RECORD,)


async def test_C18_killed_redis_raises_and_serves_again_after_its_restart(
    redis: RedisRegistry, redis_server: RedisServer
) -> None:
    await redis.register(RECORD, 10.0)
    redis_server.kill()
    with pytest.raises(RegistryUnavailable):
        await redis.register(RECORD, 10.0)
    with pytest.raises(RegistryUnavailable):
        await redis.list_workers()
    with pytest.raises(RegistryUnavailable):
        await redis.deregister(RECORD.worker_id, RECORD.incarnation)
    redis_server.start()
    assert await redis.list_workers() == ()
    await redis.register(RECORD, 10.0)
    assert await redis.list_workers() == (RECORD,)


async def test_C18_redis_restarted_between_two_calls_is_not_noticed(
    redis: RedisRegistry, redis_server: RedisServer
) -> None:
    await redis.register(RECORD, 10.0)
    redis_server.kill()
    redis_server.start()
    await redis.register(RECORD, 10.0)
    assert await redis.list_workers() == (RECORD,)


async def test_store_that_accepts_but_never_answers_meets_the_deadline() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, RedisRegistry(f"redis://127.0.0.1:{port}", "test", 0.2) as registry:
        async with asyncio.timeout(5):
            with pytest.raises(RegistryUnavailable):
                await registry.list_workers()


def test_record_survives_encoding() -> None:
    assert decode_record(encode_record(RECORD)) == RECORD


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    value = encode_record(RECORD).replace(b"{", b'{"colour": "red", ', 1)
    assert decode_record(value) == RECORD


async def swallow_cancel(started: asyncio.Event) -> str:
    """Ends well in the very turn in which it is cancelled."""
    started.set()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return "sent"


async def test_C9_a_cancel_that_the_client_swallows_still_ends_the_task():
    started = asyncio.Event()

    async def renew_for_ever() -> None:
        while True:
            await heed_cancel(swallow_cancel(started))

    task = asyncio.create_task(renew_for_ever())
    await started.wait()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5.0)
    assert done
    assert task.cancelled()


async def test_a_call_made_while_its_task_ends_is_not_cut_short():
    answers: list[str] = []
    begun = asyncio.Event()

    async def answer() -> str:
        return "left"

    async def leave_at_the_end() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            answers.append(await heed_cancel(answer()))

    task = asyncio.create_task(leave_at_the_end())
    await begun.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=5.0)
    assert answers == ["left"]
    assert task.cancelled()


async def test_stages_of_a_worker_are_listed_in_their_order(registry: Registry) -> None:
    third = replace(STAGE, stage=3)
    for record in (third, STAGE, replace(STAGE, worker_id=WorkerId("decode-00"))):
        await registry.register_stage(record, 10.0)
    assert await registry.list_stages(WorkerId("decode-0")) == (STAGE, third)
    assert await registry.list_workers() == ()


async def test_only_its_own_incarnation_removes_a_stage(registry: Registry) -> None:
    await registry.register_stage(STAGE, 10.0)
    await registry.deregister_stage(replace(STAGE, incarnation=Incarnation(2**64 - 4)))
    assert await registry.list_stages(STAGE.worker_id) == (STAGE,)
    await registry.deregister_stage(STAGE)
    assert await registry.list_stages(STAGE.worker_id) == ()


async def test_a_stage_disappears_when_its_lease_ends() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    await registry.register_stage(STAGE, 3.0)
    clock.advance(2.9)
    assert await registry.list_stages(STAGE.worker_id) == (STAGE,)
    clock.advance(0.2)
    assert await registry.list_stages(STAGE.worker_id) == ()


async def test_redis_is_told_the_lease_of_a_stage(
    redis: RedisRegistry, redis_server: RedisServer
) -> None:
    await redis.register_stage(STAGE, 5.0)
    async with Redis.from_url(redis_server.url) as client:
        assert 0 < await client.pttl("pdserve:test:stage:decode-0:1") <= 5000
