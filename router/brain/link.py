"""A front's connection to its brain: opened again whenever it breaks, or the brain is silent.

    away -> connected, all that is in flight was told -> welcomed -> up -> away
                                                          silent for too long, or closed

While it is away calls fail at once; whoever can wait does so until the next change.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.config.router import BRAIN_BEAT_S
from pdserve.errors import NoBrain
from pdserve.rpc.channel import AsyncChannel, ChannelClosed
from pdserve.rpc.v1 import brain_pb2
from router.admission import AdmittedLoad
from router.brain.talk import Talk
from router.brain.wire import load_from_wire, load_to_wire

logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""Between two tries to connect."""
ASK_TIMEOUT_S = 2.0
"""For what other fronts know."""


class LinkListener(Protocol):
    """The front behind the link."""

    def hello(self) -> brain_pb2.FrontHello:
        """Returns who this is, and all that is in flight."""
        ...

    def on_change(self) -> None:
        """Takes note that asking again may help."""
        ...

    def load(self) -> AdmittedLoad:
        """Returns what this front has admitted."""
        ...

    def on_load(self, others: AdmittedLoad) -> None:
        """Takes note of what all other fronts have admitted."""
        ...

    async def on_question(self, question: brain_pb2.FrontQuestion) -> brain_pb2.FrontReply:
        """Answers another front."""
        ...


@dataclass(slots=True, eq=False)
class _Pending:
    answer: asyncio.Future[brain_pb2.PlaceAnswer | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """None: the brain is gone."""
    limit: asyncio.Timeout | None = None


class BrainLink:
    """One front's link. One event loop."""

    def __init__(
        self, path: str, listener: LinkListener, *, silence_s: float, call_timeout_s: float
    ) -> None:
        """Connects when `run` does.

        Args:
            path: of the brain's socket.
            listener: whom it works for.
            silence_s: a brain that says nothing for longer is given up.
            call_timeout_s: for an answer, or for word that the turn has not come yet.
        """
        self._path = path
        self._listener = listener
        self._silence_s = silence_s
        self._call_timeout_s = call_timeout_s
        self._talk: Talk | None = None
        self.is_up = False
        self._heard_at_s: float | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._asked: dict[int, asyncio.Future[brain_pb2.FrontReplies | None]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def unheard_s(self) -> float | None:
        """Seconds since the brain said anything; None: it never has."""
        if self._heard_at_s is None:
            return None
        return asyncio.get_running_loop().time() - self._heard_at_s

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        while True:
            try:
                await self._live()
            except (OSError, ChannelClosed, TimeoutError) as error:
                if self.is_up:
                    logger.warning("the brain is away", extra={"why": str(error) or "silence"})
            finally:
                self._fall()
            await asyncio.sleep(RETRY_S)

    def say(self, word: brain_pb2.Word) -> None:
        """Tells the brain something; while it is away nothing: it is told all when it is back."""
        if self._talk is not None:
            self._talk.say(word)

    async def call(
        self, wire: brain_pb2.PlaceCall, undo: Callable[[], None]
    ) -> brain_pb2.PlaceAnswer:
        """Asks for workers.

        Args:
            wire: the question; it gets its number here.
            undo: tells the brain what it may have done for nothing: nobody takes the answer.

        Raises:
            NoBrain: it is away, or gave no sign in time.
        """
        if not self.is_up:
            raise NoBrain("the router's brain is away")
        number = wire.call = next(self._numbers)
        pending = self._pending[number] = _Pending()
        self.say(brain_pb2.Word(place=wire))
        try:
            async with asyncio.timeout(self._call_timeout_s) as pending.limit:
                answer = await pending.answer
        except (TimeoutError, asyncio.CancelledError) as error:
            self.say(brain_pb2.Word(withdrawal=brain_pb2.Withdrawal(call=number)))
            undo()
            if isinstance(error, asyncio.CancelledError):
                raise
            text = f"the router's brain gave no answer within {self._call_timeout_s:g} s"
            raise NoBrain(text) from None
        finally:
            del self._pending[number]
        if answer is None:
            raise NoBrain("the router's brain went away")
        return answer

    async def ask(self, question: brain_pb2.FrontQuestion) -> brain_pb2.FrontReplies:
        """Asks all other fronts, and the brain itself.

        Raises:
            NoBrain: it is away, or gave no answer in time.
        """
        if not self.is_up:
            raise NoBrain("the router's brain is away, other fronts cannot be asked")
        number = question.number = next(self._numbers)
        future: asyncio.Future[brain_pb2.FrontReplies | None]
        future = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self.say(brain_pb2.Word(question=question))
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                replies = await future
        except TimeoutError:
            raise NoBrain(f"other fronts gave no answer within {ASK_TIMEOUT_S:g} s") from None
        finally:
            del self._asked[number]
        if replies is None:
            raise NoBrain("the router's brain went away")
        return replies

    async def _live(self) -> None:
        """Lives through one connection."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            # Local: at once, or not at all.
            sock.connect(self._path)
        except OSError:
            sock.close()
            raise
        talk = Talk(AsyncChannel(sock))
        # In one go: what changes from now on is told as it happens.
        talk.say(brain_pb2.Word(hello=self._listener.hello()))
        self._talk = talk
        tasks = [
            asyncio.create_task(talk.write(), name="brain-words"),
            asyncio.create_task(self._beat(talk), name="brain-beats"),
        ]
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    words = await talk.listen()
                self._heard_at_s = asyncio.get_running_loop().time()
                for word in words:
                    self._take(word)
        finally:
            self._talk = None
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            talk.close()

    def _fall(self) -> None:
        was_up, self.is_up = self.is_up, False
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_result(None)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(None)
        if was_up:
            self._listener.on_change()

    def _take(self, word: brain_pb2.Word) -> None:
        match word.WhichOneof("word"):
            case "placed":
                pending = self._pending.get(word.placed.call)
                if pending is not None and not pending.answer.done():
                    pending.answer.set_result(word.placed)
            case "beat":
                self._prolong(word.beat.waiting)
                self._listener.on_load(load_from_wire(word.beat.load))
            case "change":
                self._listener.on_change()
            case "welcome":
                self.is_up = True
                logger.info("the brain is there")
                self._listener.on_change()
            case "question":
                task = asyncio.create_task(self._answer(word.question))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case "replies":
                asked = self._asked.get(word.replies.number)
                if asked is not None and not asked.done():
                    asked.set_result(word.replies)

    def _prolong(self, calls: Iterable[int]) -> None:
        until_s = asyncio.get_running_loop().time() + self._call_timeout_s
        for number in calls:
            pending = self._pending.get(number)
            if pending is None or pending.limit is None or pending.limit.expired():
                continue
            pending.limit.reschedule(until_s)

    async def _answer(self, question: brain_pb2.FrontQuestion) -> None:
        try:
            reply = await self._listener.on_question(question)
        except Exception:
            # Another front's question must not end this one's link.
            logger.exception("a question could not be answered")
            return
        reply.number = question.number
        self.say(brain_pb2.Word(reply=reply))

    async def _beat(self, talk: Talk) -> None:
        """Says that this front lives, and what it has, until cancelled."""
        while True:
            await asyncio.sleep(BRAIN_BEAT_S)
            beat = brain_pb2.BrainBeat(load=load_to_wire(self._listener.load()))
            talk.say(brain_pb2.Word(beat=beat))
