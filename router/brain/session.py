"""One front, as the brain sees it for as long as it is connected.

Whatever it has at workers is given back when the connection ends, and told anew by the next one.
"""

import asyncio
import logging
from collections.abc import Callable

from pdserve.config.router import BRAIN_BEAT_S
from pdserve.errors import InternalError, InvalidField, PdserveError
from pdserve.request import FrontId, RequestId
from pdserve.rpc.v1 import brain_pb2
from router.admission import AdmittedLoad
from router.brain.parts import Brain
from router.brain.talk import Talk
from router.brain.wire import (
    holding_from_wire,
    load_from_wire,
    load_to_wire,
    placed_to_wire,
    query_from_wire,
    refusal_to_wire,
    worker_from_wire,
)

logger = logging.getLogger(__name__)

HEARD_S = 4 * BRAIN_BEAT_S
"""A front that has said nothing for longer may be frozen."""


class Session:
    """Serves one front. One event loop."""

    def __init__(
        self,
        talk: Talk,
        brain: Brain,
        owners: dict[str, int],
        number: int,
        hello: brain_pb2.FrontHello,
    ) -> None:
        """Charges what the front has in flight.

        Args:
            talk: to the front.
            brain: serves all fronts.
            owners: the session of each request; shared by all sessions.
            number: of no other session.
            hello: the front's first word.
        """
        self._owners = owners
        self._talk = talk
        self._brain = brain
        self._number = number
        self.front_id = FrontId(hello.front_id)
        self.front_number = hello.number
        self.front_pid = hello.pid
        self.load = AdmittedLoad()
        """As the front said with its last beat."""
        self._heard_s = asyncio.get_running_loop().time()
        self._ids: set[str] = set()
        """Requests that may be charged, by the ids that the front knows."""
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[brain_pb2.FrontReply | None]] = {}
        for holding in hello.holdings:
            brain.book.adopt(holding_from_wire(holding, self._name))
            self._ids.add(holding.request_id)
            owners[holding.request_id] = number
        talk.say(brain_pb2.Word(welcome=brain_pb2.BrainWelcome()))

    async def beat(self, load_of_others: Callable[[], AdmittedLoad]) -> None:
        """Says that the brain lives, and whose turn has not come, until cancelled."""
        while True:
            beat = brain_pb2.BrainBeat(waiting=self._calls, load=load_to_wire(load_of_others()))
            self._talk.say(brain_pb2.Word(beat=beat))
            await asyncio.sleep(BRAIN_BEAT_S)

    @property
    def is_heard(self) -> bool:
        """Whether the front has said something a moment ago."""
        return asyncio.get_running_loop().time() - self._heard_s <= HEARD_S

    def tell_change(self) -> None:
        """Lets requests that found no worker ask again."""
        self._talk.say(brain_pb2.Word(change=brain_pb2.FleetChange()))

    def take(self, word: brain_pb2.Word) -> None:
        """Takes a word; questions to other fronts are not for here."""
        self._heard_s = asyncio.get_running_loop().time()
        match word.WhichOneof("word"):
            case "place":
                call = word.place.call
                task = asyncio.create_task(self._place(word.place))
                self._calls[call] = task
                task.add_done_callback(lambda _: self._calls.pop(call, None))
            case "withdrawal":
                withdrawn = self._calls.get(word.withdrawal.call)
                if withdrawn is not None:
                    withdrawn.cancel()
            case "reply":
                asked = self._asked.get(word.reply.number)
                if asked is not None and not asked.done():
                    asked.set_result(word.reply)
            case _:
                self._take_news(word)

    def _take_news(self, word: brain_pb2.Word) -> None:
        """Takes what has become of a request."""
        book, placer = self._brain.book, self._brain.placer
        match word.WhichOneof("word"):
            case "hold":
                request_id = self._name(word.hold.request_id)
                book.keep_only(request_id, [worker_from_wire(one) for one in word.hold.workers])
                if not book.workers_of(request_id):
                    self._ids.discard(word.hold.request_id)
                    self._disown(word.hold.request_id)
            case "prompt_done":
                request_id = self._name(word.prompt_done.request_id)
                book.finish_prefill(request_id, worker_from_wire(word.prompt_done.worker))
            case "cached":
                worker = worker_from_wire(word.cached.worker)
                # A lost worker has been forgotten: nothing may bring it back.
                if self._brain.pool.knows(worker):
                    placer.note_cached(worker, word.cached.granules)
            case "beat":
                self.load = load_from_wire(word.beat.load)
            case "output":
                placer.note_output(word.output.num_tokens)
            case other:
                logger.warning("an unexpected word of a front", extra={"word": other})

    async def ask(
        self, question: brain_pb2.FrontQuestion, timeout_s: float
    ) -> brain_pb2.FrontReply | None:
        """Asks the front; None if it does not answer in time."""
        future: asyncio.Future[brain_pb2.FrontReply | None]
        future = asyncio.get_running_loop().create_future()
        self._asked[question.number] = future
        self._talk.say(brain_pb2.Word(question=question))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._asked[question.number]

    def close(self) -> None:
        """Gives back all that the front has: places of those that wait, and load."""
        for task in self._calls.values():
            task.cancel()
        for request_id in self._ids:
            self._brain.book.keep_only(self._name(request_id), ())
            self._disown(request_id)
        self._ids.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_result(None)

    async def _place(self, wire: brain_pb2.PlaceCall) -> None:
        answer = brain_pb2.PlaceAnswer(call=wire.call)
        placer = self._brain.placer
        try:
            self._own(wire.request_id)
            query = query_from_wire(wire, self._name)
            if wire.HasField("held_by"):
                prefill = worker_from_wire(wire.held_by)
                placed = placer.place_decode_and_tell(query, prefill)
            else:
                placed = await placer.place_and_tell(query)
        except PdserveError as error:
            answer.refusal.CopyFrom(refusal_to_wire(error))
        except Exception:
            # One request's defect must not end what all others are served by.
            logger.exception("a choice failed")
            answer.refusal.CopyFrom(refusal_to_wire(InternalError("the router's brain failed")))
        else:
            self._ids.update((wire.request_id, *wire.followers))
            answer.chosen.CopyFrom(placed_to_wire(placed))
        finally:
            if wire.request_id not in self._ids:
                self._disown(wire.request_id)
        self._talk.say(brain_pb2.Word(placed=answer))

    def _own(self, request_id: str) -> None:
        """Makes sure that no other front has a request of this id: workers know it by that.

        Raises:
            InvalidField: another has.
        """
        if self._owners.setdefault(request_id, self._number) != self._number:
            raise InvalidField("request_id", request_id, "unique among those in flight")

    def _disown(self, request_id: str) -> None:
        if self._owners.get(request_id) == self._number:
            del self._owners[request_id]

    def _name(self, request_id: str) -> RequestId:
        """Names a request as no other session does: its front may have been another's."""
        return RequestId(f"{self._number}/{request_id}")
