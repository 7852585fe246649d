"""Who is alive: the pool's own clock, the registry's gaps, frozen workers that wake up."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.predictor.predictor import NUM_WARM_UP_SAMPLES, DecodeSample, Predictor
from pdserve.registry.memory import MemoryRegistry
from pdserve.request import FrontId, Role
from pdserve.rpc.v1 import types_pb2, worker_pb2
from pdserve.timeline import ManualClock, PauseWatch
from router.fleet import Fleet
from router.load_book import LoadBook
from router.policy import WorkerKey
from router.worker_pool import DEPARTED_S, FLIPPING_S, WorkerPool
from tests.support.fake_network import FakeNetwork
from tests.support.fake_script import Script
from tests.support.fake_tokens import expected_tokens
from tests.support.fake_worker import FakeWorker
from tests.support.router_harness import PROMPT, eventually, generate, let_others_run, request_for


class Listener:
    def __init__(self) -> None:
        self.lost: list[str] = []
        self.num_batches = 0

    def on_batch(self, worker: WorkerKey, batch: worker_pb2.StreamBatch) -> None:
        self.num_batches += 1

    def on_worker_lost(self, worker: WorkerKey, why: str) -> None:
        self.lost.append(why)

    def resumes_for(self, worker: WorkerKey) -> list[worker_pb2.Resume]:
        return []


class Scene:
    def __init__(self, predictor: Predictor | None = None) -> None:
        self.clock = ManualClock()
        self.registry = MemoryRegistry(self.clock)
        self.network = FakeNetwork(self.registry)
        self.listener = Listener()
        self.pool = WorkerPool(
            self.registry,
            FrontId("front"),
            LoadBook(Fleet(3.0), self.clock),
            self.clock,
            silence_s=3.0,
            max_message_bytes=1 << 20,
            predictor=predictor,
        )
        self.pool.listen(self.listener)

    async def add(self, worker_id: str = "d0", **over: object) -> FakeWorker:
        worker = await self.network.start(worker_id, Role.DECODE, **over)
        await self.pool.poll()
        await eventually(lambda: self.pool.num_available(Role.DECODE) == 1)
        return worker


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    await scene.pool.close()
    await scene.network.stop()


async def test_a_worker_that_says_nothing_is_lost_after_the_limit(scene):
    worker = await scene.add()
    worker.is_frozen = True
    own_pause = PauseWatch(5.0, scene.clock.now())
    scene.clock.advance(3.0)
    scene.pool.drop_silent(own_pause)
    assert scene.listener.lost == []
    scene.clock.advance(0.1)
    scene.pool.drop_silent(own_pause)
    assert scene.listener.lost == ["silent for 3.1 s"]
    assert scene.pool.views() == []


async def test_C19_a_router_that_stood_still_blames_no_worker(scene):
    await scene.add()
    own_pause = PauseWatch(1.5, scene.clock.now())
    scene.clock.advance(30.0)
    scene.pool.drop_silent(own_pause)
    assert scene.listener.lost == []
    heard = scene.listener.num_batches
    await eventually(lambda: scene.listener.num_batches > heard)
    scene.pool.drop_silent(own_pause)
    assert scene.listener.lost == []


async def test_a_silent_worker_is_not_chosen_even_before_it_is_declared_dead(scene):
    worker = await scene.add()
    worker.is_frozen = True
    scene.clock.advance(3.1)
    assert [view.is_available for view in scene.pool.views()] == [False]


async def test_C18_a_worker_that_vanished_from_the_registry_stays_while_it_speaks(scene):
    await scene.add()
    scene.registry.clear()
    await scene.pool.poll()
    scene.registry.is_available = False
    await scene.pool.poll()
    assert scene.pool.num_available(Role.DECODE) == 1
    assert scene.listener.lost == []


async def test_a_dead_worker_that_is_still_listed_is_tried_again_after_a_pause(scene):
    worker = await scene.add()
    await worker.die()
    await eventually(lambda: scene.listener.lost == ["connection refused"])
    await scene.pool.poll()
    assert scene.pool.views() == []
    scene.clock.advance(1.1)
    await scene.pool.poll()
    assert [view.is_available for view in scene.pool.views()] == [False]


async def test_a_new_incarnation_replaces_the_old_at_once(scene):
    await scene.add()
    await scene.network.start("d0", Role.DECODE, incarnation=9)
    await scene.pool.poll()
    assert scene.listener.lost == ["replaced by a new incarnation"]
    await eventually(lambda: scene.pool.num_available(Role.DECODE) == 1)
    assert [view.key.incarnation for view in scene.pool.views()] == [9]


async def test_a_draining_worker_takes_no_new_work_but_is_not_lost(scene):
    worker = await scene.add()
    worker.script.is_draining = True
    await eventually(lambda: scene.pool.num_available(Role.DECODE) == 0)
    assert scene.listener.lost == []
    assert not scene.pool.can_serve


async def test_a_poll_that_fails_does_not_blind_the_router(scene, monkeypatch):
    async def fail() -> None:
        raise ValueError("a record of another version")

    monkeypatch.setattr(scene.registry, "list_workers", fail)
    running = asyncio.create_task(scene.pool.run(0.01))
    await let_others_run(10)
    monkeypatch.undo()
    await scene.network.start("d0", Role.DECODE)
    await eventually(lambda: scene.pool.num_available(Role.DECODE) == 1)
    running.cancel()
    await asyncio.wait((running,))


async def test_a_frozen_worker_that_wakes_up_is_told_that_its_attempt_is_over(cluster):
    await cluster.add("d0", Script(freeze_before=5, token_delay_s=0.02))
    await cluster.ready(1)
    running = asyncio.create_task(generate(cluster, request_for(max_tokens=150)))
    (frozen,) = cluster.network.workers.values()
    await eventually(lambda: frozen.is_frozen)
    await cluster.add("d1")
    result = await running
    assert result.token_ids == expected_tokens(PROMPT, 150)
    frozen.wake(result.request_id)
    await eventually(lambda: ("d0", result.request_id, 1) in cluster.network.cancels)
    await cluster.quiet()


async def test_a_worker_that_died_is_remembered_until_it_is_back_or_long_gone(scene):
    worker = await scene.add()
    await worker.die()
    await eventually(lambda: scene.pool.num_available(Role.DECODE) == 0)
    assert [(one.record.worker_id, one.is_flipping) for one in scene.pool.departed()] == [
        ("d0", False)
    ]
    await scene.add(incarnation=7)
    assert scene.pool.departed() == []


async def test_a_worker_that_never_comes_back_is_forgotten(scene):
    worker = await scene.add()
    await worker.die()
    await eventually(lambda: len(scene.pool.departed()) == 1)
    scene.clock.advance(DEPARTED_S)
    assert scene.pool.departed() == []


async def test_a_worker_that_drained_is_not_missed(scene):
    worker = await scene.add()
    worker.script.is_draining = True
    await worker.register()
    await scene.pool.poll()
    await worker.die()
    await eventually(lambda: not list(scene.pool.links()))
    assert scene.pool.departed() == []


async def test_a_worker_that_flips_is_on_its_way_until_it_is_back_or_long_away(scene):
    worker = await scene.add()
    # What it says last is all that tells: the registry was not read meanwhile.
    worker.script.is_draining = worker.script.is_flipping = True
    await eventually(lambda: scene.pool.num_available(Role.DECODE) == 0)
    await worker.die()
    await eventually(lambda: not list(scene.pool.links()))
    assert [one.is_flipping for one in scene.pool.departed()] == [True]
    scene.clock.advance(FLIPPING_S)
    assert [one.is_flipping for one in scene.pool.departed()] == [False]
    await scene.registry.deregister(worker.key.worker_id, worker.incarnation)
    await scene.network.start("d0", Role.PREFILL, incarnation=7)
    await scene.pool.poll()
    await eventually(lambda: scene.pool.num_available(Role.PREFILL) == 1)
    assert scene.pool.departed() == []


async def test_who_starts_anew_learns_from_what_workers_measured_before_and_once() -> None:
    predictor = Predictor()
    scene = Scene(predictor)
    worker = await scene.network.start("d0", Role.DECODE)
    worker.remember(
        [
            types_pb2.StepSample(
                seconds=0.01 + 0.001 * number,
                decode=types_pb2.DecodeStep(num_sequences=number, num_kv_tokens=0),
            )
            for number in range(1, 31)
        ]
    )
    await scene.pool.poll()
    await eventually(lambda: scene.listener.num_batches > 0)
    law = predictor.law("unknown", DecodeSample)
    assert law == pytest.approx((0.01, 0.001, 0.0), abs=1e-6)
    heard = scene.listener.num_batches
    worker.break_streams()
    await eventually(lambda: worker.num_streams == 2 and scene.listener.num_batches > heard)
    assert [fit.num_samples for fit in predictor.qualities()] == [30 - NUM_WARM_UP_SAMPLES]
    await scene.pool.close()
    await scene.network.stop()
