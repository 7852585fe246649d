"""A `Placer` whose brain is another process: asks it, and keeps a book of what it charged.

The book is what this front tells a brain that has just started, or that it has just found again.
"""

import os
from collections.abc import Collection, Sequence

from pdserve.request import FrontId, RequestId
from pdserve.rpc.v1 import brain_pb2
from router.brain.link import BrainLink
from router.brain.wire import (
    holding_to_wire,
    placed_from_wire,
    query_to_wire,
    refusal_from_wire,
    worker_to_wire,
)
from router.load_book import LoadBook
from router.placer import Placed, PlaceQuery
from router.policy import Choice
from router.worker_key import WorkerKey


class RemotePlacer:
    """Works for one front."""

    def __init__(self, link: BrainLink, book: LoadBook) -> None:
        """Takes the link, and the book that is told in `make_hello`."""
        self._link = link
        self._book = book

    async def place(self, query: PlaceQuery) -> Choice:
        """Asks for workers; see `Placer`."""
        placed = await self._ask(query, query_to_wire(query))
        choice = placed.choice
        if placed.prompt is not None:
            computes = choice.prefill or choice.decode
            self._book.charge_prefill(query.request_id, computes, placed.prompt)
        self._charge_decode(query, placed)
        return choice

    async def place_decode(self, query: PlaceQuery, prefill: WorkerKey) -> Choice:
        """Asks for another decode worker; see `Placer`."""
        wire = query_to_wire(query)
        wire.held_by.CopyFrom(worker_to_wire(prefill))
        placed = await self._ask(query, wire)
        self._charge_decode(query, placed)
        return placed.choice

    def finish_prefill(self, request_id: RequestId, worker: WorkerKey) -> None:
        """Tells that a prompt is computed, if that is news."""
        if self._book.finish_prefill(request_id, worker):
            done = brain_pb2.PromptDone(request_id=request_id, worker=worker_to_wire(worker))
            self._link.say(brain_pb2.Word(prompt_done=done))

    def keep_only(self, request_id: RequestId, workers: Collection[WorkerKey]) -> None:
        """Tells who still works for a request, if that is news."""
        if self._book.keep_only(request_id, workers):
            self._say_held(request_id)

    def note_cached(self, worker: WorkerKey, granules: Sequence[int]) -> None:
        """Tells of a prefix."""
        cached = brain_pb2.CachedPrefix(worker=worker_to_wire(worker), granules=granules)
        self._link.say(brain_pb2.Word(cached=cached))

    def forget(self, worker: WorkerKey) -> None:
        """Does nothing: the brain sees a worker's death itself."""

    def note_output(self, num_tokens: int) -> None:
        """Tells the length of an output."""
        self._link.say(brain_pb2.Word(output=brain_pb2.EndedOutput(num_tokens=num_tokens)))

    async def _ask(self, query: PlaceQuery, wire: brain_pb2.PlaceCall) -> Placed:
        def undo() -> None:
            for request_id in (query.request_id, *query.followers):
                self._say_held(request_id)

        answer = await self._link.call(wire, undo)
        if answer.WhichOneof("outcome") == "refusal":
            raise refusal_from_wire(answer.refusal)
        return placed_from_wire(answer.chosen)

    def _charge_decode(self, query: PlaceQuery, placed: Placed) -> None:
        decode = placed.choice.decode
        self._book.charge_decode(query.request_id, decode, placed.decode)
        for request_id in query.followers:
            self._book.charge_decode(request_id, decode, placed.follower)

    def _say_held(self, request_id: RequestId) -> None:
        workers = [worker_to_wire(key) for key in self._book.workers_of(request_id)]
        hold = brain_pb2.Hold(request_id=request_id, workers=workers)
        self._link.say(brain_pb2.Word(hold=hold))


def make_hello(front_id: FrontId, number: int, book: LoadBook) -> brain_pb2.FrontHello:
    """Returns who a front is, and what it has at workers."""
    holdings = [holding_to_wire(one) for one in book.holdings()]
    return brain_pb2.FrontHello(
        front_id=front_id, number=number, pid=os.getpid(), holdings=holdings
    )
