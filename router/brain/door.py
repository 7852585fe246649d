"""Where fronts come in: a local socket, one session for each front that is connected."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Coroutine, Iterator
from pathlib import Path

from pdserve.exposition import Exposes
from pdserve.request import Role
from pdserve.rpc.channel import AsyncChannel, ChannelClosed
from pdserve.rpc.v1 import brain_pb2, inference_pb2
from router.admission import AdmittedLoad
from router.brain.parts import Brain
from router.brain.session import Session
from router.brain.talk import Talk
from router.run_settings import BRAIN, front_name

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.0
"""For each front's answer to another's question."""
_HELLO_TIMEOUT_S = 5.0
_BACKLOG = 128


class Door:
    """Owns the sessions. One event loop."""

    def __init__(self, brain: Brain, exposition: Exposes) -> None:
        """Lets nobody in before `run`.

        Args:
            brain: serves all.
            exposition: of the brain's own series.
        """
        self._brain = brain
        self._exposition = exposition
        self._started_s = brain.clock.now()
        self._numbers = itertools.count(1)
        self._sessions: dict[Session, Talk] = {}
        self._owners: dict[str, int] = {}
        """The session of each request in flight, by the request's id."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_fronts(self) -> int:
        """Fronts that are connected."""
        return len(self._sessions)

    async def run(self, path: Path) -> None:
        """Lets fronts in until cancelled; whatever was at the path is replaced."""
        loop = asyncio.get_running_loop()
        with _listen(path) as listener:
            self._start(self._tell_changes())
            try:
                while True:
                    sock, _ = await loop.sock_accept(listener)
                    self._start(self._serve(Talk(AsyncChannel(sock))))
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)

    async def ask(
        self, question: brain_pb2.FrontQuestion, asker: Session | None = None
    ) -> brain_pb2.FrontReplies:
        """Asks all fronts but the asker; the brain's own answer is among the replies."""
        others = [session for session in self._sessions if session is not asker]
        onward = brain_pb2.FrontQuestion()
        onward.CopyFrom(question)
        onward.number = next(self._numbers)
        found = await asyncio.gather(*(one.ask(onward, ASK_TIMEOUT_S) for one in others))
        own = await self._answer(question)
        replies = [reply for reply in (*found, own) if reply is not None]
        return brain_pb2.FrontReplies(
            number=question.number, replies=replies, num_asked=len(others)
        )

    async def _answer(self, question: brain_pb2.FrontQuestion) -> brain_pb2.FrontReply | None:
        match question.WhichOneof("about"):
            case "metrics":
                text = await asyncio.to_thread(self._exposition.generate)
                return brain_pb2.FrontReply(metrics=text.decode())
            case "info":
                return brain_pb2.FrontReply(info=self._describe())
        return None

    def _describe(self) -> inference_pb2.GetServerInfoResponse:
        """Describes the brain, and fronts that say nothing."""
        pool = self._brain.pool
        silent = [
            inference_pb2.RouterProcess(
                name=front_name(one.front_number), pid=one.front_pid, state="silent"
            )
            for one in self._sessions
            if not one.is_heard
        ]
        own = inference_pb2.RouterProcess(
            name=BRAIN,
            pid=os.getpid(),
            state="serving",
            uptime_s=self._brain.clock.now() - self._started_s,
        )
        return inference_pb2.GetServerInfoResponse(
            num_prefill=pool.num_available(Role.PREFILL),
            num_decode=pool.num_available(Role.DECODE),
            processes=[*silent, own],
        )

    async def _serve(self, talk: Talk) -> None:
        writing = asyncio.create_task(talk.write())
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first, *rest = await talk.listen()
            if first.WhichOneof("word") == "hello":
                await self._serve_front(talk, first.hello, rest)
            else:
                # Somebody wants to know who lives.
                heard = [one.front_number for one in self._sessions if one.is_heard]
                talk.say(brain_pb2.Word(beat=brain_pb2.BrainBeat(fronts=heard)))
                await talk.listen()
        except (ChannelClosed, TimeoutError):
            pass  # it is gone: its session gave back what it had
        except Exception:
            # One connection must not end what all others are served by.
            logger.exception("a front's words could not be taken")
        finally:
            writing.cancel()
            await asyncio.wait((writing,))
            talk.close()

    async def _serve_front(
        self, talk: Talk, hello: brain_pb2.FrontHello, words: list[brain_pb2.Word]
    ) -> None:
        with self._session(talk, hello) as session:
            beating = asyncio.create_task(session.beat(lambda: self._load_beside(session)))
            try:
                while True:
                    for word in words:
                        if word.WhichOneof("word") == "question":
                            self._start(self._relay(session, talk, word.question))
                        else:
                            session.take(word)
                    words = list(await talk.listen())
            finally:
                beating.cancel()

    def _load_beside(self, session: Session) -> AdmittedLoad:
        others = [one.load for one in self._sessions if one is not session]
        return AdmittedLoad(
            num_in_flight=sum(load.num_in_flight for load in others),
            num_waiting=sum(load.num_waiting for load in others),
        )

    @contextlib.contextmanager
    def _session(self, talk: Talk, hello: brain_pb2.FrontHello) -> Iterator[Session]:
        # A front that comes again while its old connection is not known to be broken.
        for old in [one for one in self._sessions if one.front_id == hello.front_id]:
            old.close()
            self._sessions.pop(old).hang_up()
        session = Session(talk, self._brain, self._owners, next(self._numbers), hello)
        self._sessions[session] = talk
        extra = {"front_id": session.front_id, "num_holdings": len(hello.holdings)}
        logger.info("a front came", extra=extra)
        try:
            yield session
        finally:
            session.close()
            self._sessions.pop(session, None)
            logger.info("a front left", extra={"front_id": session.front_id})

    async def _relay(self, session: Session, talk: Talk, question: brain_pb2.FrontQuestion) -> None:
        try:
            replies = await self.ask(question, session)
        except Exception:
            # The front's question has a time limit of its own.
            logger.exception("fronts could not be asked")
            return
        talk.say(brain_pb2.Word(replies=replies))

    async def _tell_changes(self) -> None:
        changes, seen = self._brain.pool.changes, 0
        while True:
            await changes.wait(seen, 3600.0)
            if changes.count != seen:
                seen = changes.count
                for session in self._sessions:
                    session.tell_change()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
