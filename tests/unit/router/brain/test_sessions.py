"""Two fronts and a brain over a real socket, in one process: who holds what, who gives it back."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from pdserve.errors import InvalidField, NoBrain, NoWorker
from pdserve.request import RequestId
from pdserve.rpc.channel import AsyncChannel
from pdserve.rpc.v1 import brain_pb2
from router.admission import AdmittedLoad
from router.brain.pulse import feel_pulse
from router.brain.talk import Talk
from router.placer import Placed, PlaceQuery
from router.room import PROMPTS_AHEAD
from router.slo import TooLate
from tests.support.brain_scenes import D0, P0, BrainScene, FrontScene
from tests.support.cluster import wait_until_async
from tests.support.router_harness import eventually


def query(name: str, num_tokens: int = 1000, **over: object) -> PlaceQuery:
    fields = {"num_growth_tokens": 100, "granules": (), "may_be_local": False}
    return PlaceQuery(request_id=RequestId(name), num_tokens=num_tokens, **{**fields, **over})


async def test_a_choice_is_charged_in_the_brain_and_in_the_front_s_own_book(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    choice = await fronts[0].placer.place(query("r"))
    assert (choice.prefill, choice.decode) == (P0, D0)
    assert scene.load() == (1, 1, 1)
    assert fronts[0].book.workers_of(RequestId("r")) == (P0, D0)
    fronts[0].placer.finish_prefill(RequestId("r"), P0)
    await eventually(lambda: scene.load() == (1, 0, 1))
    fronts[0].placer.keep_only(RequestId("r"), ())
    await eventually(lambda: scene.load() == (0, 0, 0))
    assert fronts[0].book.num_charged == 0


async def test_a_request_s_id_is_one_front_s_until_it_has_ended(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    await fronts[0].placer.place(query("same"))
    with pytest.raises(InvalidField, match="unique among those in flight"):
        await fronts[1].placer.place(query("same"))
    assert scene.load() == (1, 1, 1)
    # The next attempt of the one that has it.
    await fronts[0].placer.place(query("same"))
    fronts[0].placer.keep_only(RequestId("same"), ())
    await eventually(lambda: scene.load() == (0, 0, 0))
    await fronts[1].placer.place(query("same"))
    assert scene.load() == (1, 1, 1)


async def test_an_id_is_free_again_when_its_request_was_cancelled_while_it_waited(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    for number in range(int(PROMPTS_AHEAD)):
        await fronts[0].placer.place(query(f"r{number}", waits_for_turn=True))
    waiting = asyncio.create_task(fronts[0].placer.place(query("same", waits_for_turn=True)))
    await eventually(lambda: len(scene.brain.room) == 1)
    with pytest.raises(InvalidField):
        await fronts[1].placer.place(query("same"))
    waiting.cancel()
    await eventually(lambda: len(scene.brain.room) == 0)
    assert (await fronts[1].placer.place(query("same"))).decode == D0


async def test_other_samples_are_charged_and_given_back_one_by_one(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    await fronts[0].placer.place(query("r#0", followers=(RequestId("r#1"), RequestId("r#2"))))
    assert scene.load() == (3, 1, 3)
    for number in range(3):
        fronts[0].placer.keep_only(RequestId(f"r#{number}"), ())
    await eventually(lambda: scene.load() == (0, 0, 0))


async def test_a_cancelled_wait_for_a_turn_frees_its_place(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    placer = fronts[0].placer
    for number in range(int(PROMPTS_AHEAD)):
        await placer.place(query(f"r{number}", waits_for_turn=True))
    waiting = asyncio.create_task(placer.place(query("late", waits_for_turn=True)))
    await eventually(lambda: len(scene.brain.room) == 1)
    waiting.cancel()
    await eventually(lambda: len(scene.brain.room) == 0)
    next_one = asyncio.create_task(fronts[1].placer.place(query("next", waits_for_turn=True)))
    await eventually(lambda: len(scene.brain.room) == 1)
    placer.finish_prefill(RequestId("r0"), P0)
    assert (await next_one).prefill == P0


async def test_a_choice_that_was_made_while_its_request_was_cancelled_is_undone(
    scene: BrainScene, fronts: list[FrontScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = scene.brain.placer.place_and_tell

    async def place_and_cancel(query: PlaceQuery) -> Placed:
        placed = await place(query)
        # Its answer is not sent yet.
        task.cancel()
        return placed

    monkeypatch.setattr(scene.brain.placer, "place_and_tell", place_and_cancel)
    task = asyncio.create_task(fronts[0].placer.place(query("r")))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.load() == (1, 1, 1)
    await eventually(lambda: scene.load() == (0, 0, 0))


async def test_a_wait_for_a_turn_may_be_longer_than_a_call(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    placer = fronts[0].placer
    for number in range(int(PROMPTS_AHEAD)):
        await placer.place(query(f"r{number}", waits_for_turn=True))
    waiting = asyncio.create_task(placer.place(query("late", waits_for_turn=True)))
    # Twice the time limit of a call that the brain says nothing of.
    await asyncio.sleep(1.0)
    assert not waiting.done()
    placer.finish_prefill(RequestId("r0"), P0)
    assert (await waiting).prefill == P0


async def test_a_front_that_dies_gives_back_its_load_and_its_place(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    for number in range(int(PROMPTS_AHEAD)):
        await fronts[0].placer.place(query(f"r{number}", waits_for_turn=True))
    waits = [
        asyncio.create_task(front.placer.place(query(front.name, waits_for_turn=True)))
        for front in fronts
    ]
    await eventually(lambda: len(scene.brain.room) == 2)
    await fronts[0].stop()
    assert (await waits[1]).prefill == P0
    assert scene.load() == (1, 1, 1)
    assert scene.door.num_fronts == 1
    with pytest.raises(NoBrain):
        await waits[0]


async def test_a_brain_that_comes_again_learns_what_is_in_flight(
    scene: BrainScene, fronts: list[FrontScene], tmp_path: Path
) -> None:
    await fronts[0].placer.place(query("a"))
    await fronts[1].placer.place(query("b"))
    fronts[1].placer.finish_prefill(RequestId("b"), P0)
    await scene.stop()
    await eventually(lambda: not any(front.link.is_up for front in fronts))
    with pytest.raises(NoBrain):
        await fronts[0].placer.place(query("c"))
    fronts[0].placer.keep_only(RequestId("a"), (D0,))
    again = BrainScene(scene.path)
    again.start()
    for front in fronts:
        await front.up()
    # The brain knows no worker yet: what is there counts as soon as it does.
    assert again.load() == (2, 0, 0)
    again.join(P0, D0)
    assert again.load() == (2, 0, 2)
    fronts[0].placer.keep_only(RequestId("a"), ())
    await eventually(lambda: again.load() == (1, 0, 1))
    await again.stop()


async def test_who_found_no_worker_is_told_when_one_comes(
    tmp_path: Path,
) -> None:
    scene = BrainScene(tmp_path / "brain")
    scene.start()
    front = FrontScene("a", scene.path)
    await front.up()
    seen = front.num_changes
    with pytest.raises(NoWorker) as caught:
        await front.placer.place(query("r"))
    assert not isinstance(caught.value, NoBrain)
    scene.join(P0, D0)
    await eventually(lambda: front.num_changes > seen)
    assert (await front.placer.place(query("r"))).decode == D0
    await front.stop()
    await scene.stop()


async def test_a_refusal_for_time_comes_through(
    scene: BrainScene, fronts: list[FrontScene], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(query: PlaceQuery) -> None:
        raise TooLate("too late", 2.5)

    monkeypatch.setattr(scene.brain.placer, "place_and_tell", refuse)
    with pytest.raises(TooLate) as caught:
        await fronts[0].placer.place(query("r"))
    assert caught.value.retry_after_s == 2.5


async def test_a_prefix_on_a_worker_that_is_gone_is_not_noted(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    fronts[0].placer.note_cached(D0, (5, 6))
    # The pool of this scene has no links at all.
    await fronts[0].placer.place(query("r"))
    assert scene.brain.index.match((5, 6)) == {}


async def test_a_front_asks_the_others_and_the_brain(fronts: list[FrontScene]) -> None:
    found = await fronts[0].link.ask(brain_pb2.FrontQuestion(metrics=True))
    texts = [reply.metrics for reply in found.replies]
    assert found.num_asked == 1
    assert texts[0] == "b\n"
    assert "pdserve_index_pairs" in texts[1]


class SilentBrain:
    """Takes connections and says what it is told to."""

    def __init__(self, path: Path, *words: brain_pb2.Word, beats: bool) -> None:
        self._words = words
        self._beats = beats
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            talk = Talk(AsyncChannel(sock))
            for word in self._words:
                talk.say(word)
            writing = asyncio.create_task(talk.write())
            try:
                while self._beats:
                    talk.say(brain_pb2.Word(beat=brain_pb2.BrainBeat()))
                    await asyncio.sleep(0.1)
                await asyncio.sleep(3600)
            finally:
                writing.cancel()
                talk.close()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))
        self._listener.close()


WELCOME = brain_pb2.Word(welcome=brain_pb2.BrainWelcome())


@pytest.mark.parametrize(("beats", "text"), [(False, "went away"), (True, "gave no answer")])
async def test_a_brain_that_does_not_answer_is_an_error_of_its_own(
    tmp_path: Path, beats: bool, text: str
) -> None:
    brain = SilentBrain(tmp_path / "brain", WELCOME, beats=beats)
    front = FrontScene("a", tmp_path / "brain", call_timeout_s=0.8)
    await front.up()
    with pytest.raises(NoBrain, match=text):
        await front.placer.place(query("r", waits_for_turn=True))
    assert front.book.num_charged == 0
    await front.stop()
    await brain.stop()


async def test_a_pulse_is_felt_only_while_the_brain_s_loop_turns(scene: BrainScene) -> None:
    assert await asyncio.to_thread(feel_pulse, str(scene.path), 2.0) == []
    # On the loop's own thread: it does not turn meanwhile.
    assert feel_pulse(str(scene.path), 0.05) is None
    await scene.stop()
    assert feel_pulse(str(scene.path), 0.05) is None


async def test_a_pulse_tells_the_fronts_that_speak_and_not_those_that_are_silent(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(scene.path))
    frozen = AsyncChannel(sock)
    hello = brain_pb2.Word(hello=brain_pb2.FrontHello(front_id="frozen", number=7))
    await frozen.send(brain_pb2.Words(words=[hello]).SerializeToString())
    await eventually(lambda: scene.door.num_fronts == 3)

    async def hears(*numbers: int) -> bool:
        found = await asyncio.to_thread(feel_pulse, str(scene.path), 2.0)
        return found is not None and sorted(found) == [*numbers]

    assert await hears(0, 1, 7)
    await wait_until_async(lambda: hears(0, 1), 5.0, "only those that speak are heard")
    frozen.close()


async def test_what_is_no_message_ends_its_connection_alone(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    sock.connect(str(scene.path))
    channel = AsyncChannel(sock)
    await channel.send(b"\xff\xff\xff")
    assert await asyncio.get_running_loop().sock_recv(sock, 10) == b""
    channel.close()
    assert (await fronts[0].placer.place(query("r"))).decode == D0


async def test_a_front_that_comes_again_before_its_old_connection_is_known_to_be_broken(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    await fronts[0].placer.place(query("r"))
    twin = FrontScene("a", scene.path)
    # Its hello is the newer one; whoever had the name before tells anew what it has.
    await twin.up()
    await eventually(lambda: scene.load()[0] in (0, 1))
    await twin.stop()
    await fronts[0].up()
    await eventually(lambda: scene.load() == (1, 1, 1) and scene.door.num_fronts == 2)


async def test_each_front_hears_what_all_others_have_admitted_until_they_are_gone(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    third = FrontScene("c", scene.path)
    await third.up()
    fronts[0].own_load = AdmittedLoad(num_in_flight=5, num_waiting=1)
    third.own_load = AdmittedLoad(num_in_flight=2, num_waiting=2)
    await eventually(lambda: fronts[1].others == AdmittedLoad(num_in_flight=7, num_waiting=3))
    await eventually(lambda: fronts[0].others == third.own_load)
    await third.stop()
    await eventually(lambda: fronts[1].others == fronts[0].own_load)
    await eventually(lambda: fronts[0].others == AdmittedLoad())


async def test_a_front_that_says_nothing_is_told_of_by_the_brain(
    scene: BrainScene, fronts: list[FrontScene]
) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(scene.path))
    frozen = AsyncChannel(sock)
    hello = brain_pb2.FrontHello(front_id="frozen", number=7, pid=4711)
    await frozen.send(brain_pb2.Words(words=[brain_pb2.Word(hello=hello)]).SerializeToString())
    await eventually(lambda: scene.door.num_fronts == 3)

    async def processes() -> list[tuple[str, str, int]]:
        found = await fronts[0].link.ask(brain_pb2.FrontQuestion(info=True))
        infos = [reply.info for reply in found.replies if reply.HasField("info")]
        return [(one.name, one.state, one.pid) for info in infos for one in info.processes]

    async def is_told() -> bool:
        own = ("brain", "serving", os.getpid())
        return await processes() == [("front-7", "silent", 4711), own]

    await wait_until_async(is_told, 10.0, "the silent front is told of")
    frozen.close()
