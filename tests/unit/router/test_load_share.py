"""Fronts see each other's load soon, and for no longer than it is said."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from launcher.redis_server import RedisServer
from pdserve.request import FrontId, Incarnation, RequestId, Role, WorkerId
from pdserve.timeline import ManualClock, MonotonicClock
from router.cost import prefill_terms
from router.fleet import Fleet, Member
from router.load_book import DecodeCharge, LoadBook
from router.load_share import EXPIRE_S, REPEAT_S, ChannelDown, LoadShare
from router.redis_loads import RedisLoadChannel
from router.worker_key import WorkerKey
from tests.support.router_harness import eventually

P0 = WorkerKey(WorkerId("p0"), Incarnation(1))


class Hub:
    """Hands every text to all that are attached, or is away."""

    def __init__(self) -> None:
        self.shares: list[LoadShare] = []
        self.texts: list[str] = []
        self.is_down = False

    async def publish(self, text: str) -> None:
        if self.is_down:
            raise ChannelDown("away")
        self.texts.append(text)
        for share in self.shares:
            share.take(text)

    async def listen(self) -> AsyncIterator[str]:
        raise ChannelDown("not used")
        yield ""


class Front:
    def __init__(self, name: str, hub: Hub, clock: ManualClock) -> None:
        self.fleet = Fleet()
        member = Member(
            key=P0,
            role=Role.PREFILL,
            digest=b"",
            worker_class="c",
            total_blocks=1,
            block_size=16,
        )
        self.row = self.fleet.join(member)
        self.book = LoadBook(self.fleet, clock)
        self.share = LoadShare(FrontId(name), self.fleet, hub, clock)
        hub.shares.append(self.share)

    @property
    def others(self) -> list[float]:
        queue = self.fleet.others_queue[:, self.row].tolist()
        return [*queue, self.fleet.others_seqs[self.row], self.fleet.others_kv_tokens[self.row]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def fronts(hub: Hub, clock: ManualClock) -> list[Front]:
    return [Front(name, hub, clock) for name in ("a", "b", "c")]


async def test_what_others_have_sent_adds_up(fronts: list[Front]) -> None:
    a, b, c = fronts
    a.book.charge_prefill(RequestId("1"), P0, prefill_terms(100, 0))
    b.book.charge_prefill(RequestId("2"), P0, prefill_terms(50, 10))
    charge = DecodeCharge(num_seqs=1, kv_tokens=70, blocks=9)
    b.book.charge_decode(RequestId("2"), P0, charge)
    for front in fronts:
        await front.share.tell()
    for front in fronts:
        front.share.refresh()
    assert c.others == [2.0, 150.0, 5000.0 + 50 * 35, 1.0, 70.0]
    assert a.others == [1.0, 50.0, 50 * 35, 1.0, 70.0]


async def test_the_end_of_load_is_news(fronts: list[Front], hub: Hub) -> None:
    a, b, _ = fronts
    a.book.charge_prefill(RequestId("1"), P0, prefill_terms(100, 0))
    await a.share.tell()
    a.book.keep_only(RequestId("1"), ())
    await a.share.tell()
    b.share.refresh()
    assert b.others == [0.0] * 5
    assert len(hub.texts) == 2


async def test_what_has_not_changed_is_repeated_and_nothing_is_not(
    fronts: list[Front], hub: Hub, clock: ManualClock
) -> None:
    a, b, _ = fronts
    a.book.charge_prefill(RequestId("1"), P0, prefill_terms(100, 0))
    for _ in range(10):
        await a.share.tell()
        await b.share.tell()
        clock.advance(REPEAT_S / 2 + 1e-6)
    assert len(hub.texts) == 5


async def test_C18_a_front_that_says_nothing_any_more_has_nothing(
    fronts: list[Front], hub: Hub, clock: ManualClock
) -> None:
    a, b, _ = fronts
    a.book.charge_prefill(RequestId("1"), P0, prefill_terms(100, 0))
    await a.share.tell()
    b.share.refresh()
    assert b.others[1] == 100.0
    hub.is_down = True
    clock.advance(EXPIRE_S + 0.01)
    await a.share.tell()
    b.share.refresh()
    assert b.others == [0.0] * 5
    hub.is_down = False
    await a.share.tell()
    b.share.refresh()
    assert b.others[1] == 100.0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"front": "x", "workers": {"p0": [1]}}', '{"front": "x"}']
)
def test_what_cannot_be_read_is_ignored(fronts: list[Front], text: str) -> None:
    fronts[0].share.take(text)
    fronts[0].share.refresh()
    assert fronts[0].others == [0.0] * 5


def test_workers_of_others_that_are_not_known_here_are_ignored(fronts: list[Front]) -> None:
    text = json.dumps({"front": "x", "workers": {"nobody": [1, 2, 3, 4, 5]}})
    fronts[0].share.take(text)
    fronts[0].share.refresh()
    assert fronts[0].others == [0.0] * 5


async def test_C18_over_redis_texts_come_to_all_and_its_end_is_said() -> None:
    server = RedisServer()
    server.start()
    try:
        async with (
            RedisLoadChannel(server.url, "c") as one,
            RedisLoadChannel(server.url, "c", timeout_s=0.5) as other,
            RedisLoadChannel(server.url, "elsewhere") as stranger,
        ):
            heard: list[str] = []

            async def listen() -> None:
                async for text in other.listen():
                    heard.append(text)

            listening = asyncio.create_task(listen())
            while not heard:
                await stranger.publish("not for you")
                await one.publish("hello")
                await asyncio.sleep(0.02)
            assert set(heard) == {"hello"}
            server.kill()
            with pytest.raises(ChannelDown):
                await listening
            with pytest.raises(ChannelDown):
                await one.publish("anybody?")
    finally:
        server.close()


async def test_a_running_share_goes_on_without_its_channel() -> None:
    hub, clock = Hub(), MonotonicClock()
    hub.is_down = True
    front = Front("a", hub, ManualClock())
    share = LoadShare(FrontId("b"), front.fleet, hub, clock)
    running = asyncio.create_task(share.run())
    front.book.charge_prefill(RequestId("1"), P0, prefill_terms(100, 0))
    await asyncio.sleep(0)
    hub.is_down = False
    await eventually(lambda: bool(hub.texts))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
