"""Turns are taken at the router while workers have enough to do."""

import asyncio

from pdserve.request import Incarnation, RequestId, Role, WorkerId
from pdserve.timeline import ManualClock
from router.cost import prefill_terms
from router.fair_queue import Turn
from router.fleet import Fleet, Member
from router.load_book import LoadBook
from router.waiting_room import WaitingRoom
from router.worker_key import WorkerKey
from tests.support.router_harness import let_others_run

P0 = WorkerKey(WorkerId("p0"), Incarnation(1))


class Scene:
    def __init__(self) -> None:
        self.fleet = Fleet()
        self.book = LoadBook(self.fleet, ManualClock())
        self.room = WaitingRoom(self.book, ManualClock())
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def add_worker(self) -> None:
        member = Member(
            key=P0,
            role=Role.PREFILL,
            digest=b"",
            worker_class="c",
            total_blocks=100,
            block_size=16,
            chunk_tokens=1000,
        )
        self.fleet.join(member)
        self.fleet.set_available(P0, is_available=True)

    def send(self, name: str, tokens: int = 1000, tenant: str = "a", priority: int = 0) -> None:
        self.tasks[name] = asyncio.create_task(self._go(name, tokens, tenant, priority))

    async def _go(self, name: str, tokens: int, tenant: str, priority: int) -> None:
        turn = Turn(tenant=tenant, priority=priority, cost=tokens)
        await self.room.wait_for_turn(turn, has_prefill_pool=True)
        self.order.append(name)
        self.book.charge_prefill(RequestId(name), P0, prefill_terms(tokens, 0))

    def finish(self, name: str) -> None:
        self.book.finish_prefill(RequestId(name), P0)


async def test_without_a_queue_a_request_goes_on_at_once() -> None:
    scene = Scene()
    scene.add_worker()
    scene.send("r0")
    await let_others_run(2)
    assert scene.order == ["r0"]


async def test_no_more_is_sent_ahead_than_keeps_a_worker_busy() -> None:
    scene = Scene()
    scene.add_worker()
    for number in range(5):
        scene.send(f"r{number}")
    await let_others_run(5)
    assert scene.order == ["r0", "r1"]
    assert scene.room.tokens_before(0) == 3000
    scene.finish("r0")
    await let_others_run(5)
    assert scene.order == ["r0", "r1", "r2"]


async def test_short_prompts_go_ahead_until_they_fill_steps() -> None:
    scene = Scene()
    scene.add_worker()
    for number in range(50):
        scene.send(f"r{number}", tokens=100)
    await let_others_run(50)
    assert len(scene.order) == 20


async def test_a_tenant_that_came_first_with_many_does_not_keep_another_waiting() -> None:
    scene = Scene()
    scene.add_worker()
    for number in range(20):
        scene.send(f"a{number}", tokens=5000)
    scene.send("b", tokens=5000, tenant="b")
    await let_others_run(5)
    for number in range(4):
        scene.finish(scene.order[number])
        await let_others_run(5)
    assert "b" in scene.order[:5]


async def test_a_higher_priority_overtakes_those_that_wait() -> None:
    scene = Scene()
    scene.add_worker()
    for number in range(4):
        scene.send(f"r{number}", priority=5)
    await let_others_run(5)
    scene.send("urgent", priority=0)
    await let_others_run(5)
    scene.finish("r0")
    await let_others_run(5)
    assert scene.order[-1] == "urgent"


async def test_A6_a_cancelled_wait_gives_its_turn_away() -> None:
    scene = Scene()
    scene.add_worker()
    for number in range(4):
        scene.send(f"r{number}")
    await let_others_run(5)
    scene.tasks["r2"].cancel()
    await let_others_run(5)
    scene.finish("r0")
    scene.finish("r1")
    await let_others_run(5)
    assert scene.order == ["r0", "r1", "r3"]
    assert len(scene.room) == 0


async def test_a_turn_that_was_called_and_then_cancelled_goes_to_the_next() -> None:
    scene = Scene()
    scene.add_worker()
    for number in range(4):
        scene.send(f"r{number}")
    await let_others_run(5)
    scene.finish("r0")
    scene.tasks["r2"].cancel()
    await let_others_run(5)
    assert scene.order == ["r0", "r1", "r3"]


async def test_with_nobody_to_wait_for_nobody_waits() -> None:
    scene = Scene()
    scene.send("r0")
    await let_others_run(2)
    assert scene.order == ["r0"]


async def test_a_turn_of_one_that_was_cancelled_in_the_same_moment_goes_to_the_next() -> None:
    scene = Scene()
    scene.add_worker()
    for number in range(4):
        scene.send(f"r{number}")
    await let_others_run(5)
    scene.tasks["r2"].cancel()
    # Before the cancelled task has run.
    scene.finish("r0")
    await let_others_run(5)
    assert scene.order == ["r0", "r1", "r3"]
