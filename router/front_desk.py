"""What may be asked of any front about all that share its port: requests by id, figures, series.

A client that comes again may reach another front than the one that has its request. So what a
front does not know it asks the others, through their brain; a single front asks nobody.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pdserve.errors import NoBrain, RequestNotFound
from pdserve.exposition import Exposes, join_expositions
from pdserve.request import RequestId
from pdserve.rpc.v1 import brain_pb2, inference_pb2
from pdserve.timeline import Clock
from router.admission import Admission
from router.dispatch import Dispatcher
from router.explain_wire import explanation_to_wire
from router.run_settings import BRAIN

Info = inference_pb2.GetServerInfoResponse
RouterProcess = inference_pb2.RouterProcess


class Others(Protocol):
    """The way to all other fronts."""

    is_up: bool
    """Whether the brain answers, as far as is known."""

    @property
    def unheard_s(self) -> float | None:
        """Seconds since the brain said anything; None: it never has."""
        ...

    async def ask(self, question: brain_pb2.FrontQuestion) -> brain_pb2.FrontReplies:
        """Asks them all.

        Raises:
            NoBrain: there is no way now.
        """
        ...


class FrontDesk:
    """Answers clients for all fronts, and other fronts for this one."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        own_info: Callable[[], Info],
        exposition: Exposes,
        clock: Clock,
        others: Others | None = None,
    ) -> None:
        """Takes what this front knows; without others it is the only one."""
        self._dispatcher = dispatcher
        self._own_info = own_info
        self._exposition = exposition
        self._clock = clock
        self._others = others
        self._told: tuple[RouterProcess, ...] = ()
        """All processes of the router, as they were last told."""
        self._told_at_s = clock.now()

    @property
    def admission(self) -> Admission:
        """Of this front."""
        return self._dispatcher.admission

    async def explain(self, request_id: RequestId, tenant: str) -> inference_pb2.ExplainResponse:
        """Tells why a tenant's request went where it went.

        Raises:
            RequestNotFound: no front remembers one of this id.
            NoBrain: this one does not, and the others cannot be asked.
        """
        try:
            return explanation_to_wire(self._dispatcher.explain(request_id, tenant))
        except RequestNotFound:
            if self._others is None:
                raise
            question = brain_pb2.FrontQuestion(tenant=tenant, explain=request_id)
            found = await self._others.ask(question)
            for reply in found.replies:
                if reply.HasField("explanation"):
                    return reply.explanation
            raise

    async def abort(self, request_id: RequestId, tenant: str) -> bool:
        """Ends a tenant's request, whichever front has it; False when none has it.

        Raises:
            NoBrain: this one has it not, and the others cannot be asked.
        """
        if self._dispatcher.abort(request_id, tenant):
            return True
        if self._others is None:
            return False
        question = brain_pb2.FrontQuestion(tenant=tenant, abort=request_id)
        found = await self._others.ask(question)
        return any(reply.was_aborted for reply in found.replies)

    async def info(self, *, accepts_partial: bool = False) -> Info:
        """Returns figures of all fronts together.

        Args:
            accepts_partial: of this one alone will do while the others cannot be asked.

        Raises:
            NoBrain: the others cannot be asked.
        """
        own = self._own_info()
        if self._others is None:
            return own
        try:
            found = await self._others.ask(brain_pb2.FrontQuestion(info=True))
        except NoBrain:
            if not accepts_partial:
                raise
            brain = RouterProcess(
                name=BRAIN,
                state="silent" if self._others.is_up else "away",
                unheard_s=self._others.unheard_s,
            )
            return tell_alone(own, brain, self._told, self._clock.now() - self._told_at_s)
        infos = [reply.info for reply in found.replies if reply.HasField("info")]
        joined = join_infos(own, infos)
        self._told, self._told_at_s = tuple(joined.processes), self._clock.now()
        return joined

    async def expose(self) -> bytes:
        """Returns the series of all fronts and of their brain; this one's alone without a brain."""
        # Some milliseconds, in which tokens must go on.
        own = await asyncio.to_thread(self._exposition.generate)
        if self._others is None:
            return own
        try:
            found = await self._others.ask(brain_pb2.FrontQuestion(metrics=True))
        except NoBrain:
            return own
        texts = [reply.metrics for reply in found.replies if reply.HasField("metrics")]
        return join_expositions([own.decode(), *texts]).encode()

    async def answer(self, question: brain_pb2.FrontQuestion) -> brain_pb2.FrontReply:
        """Answers another front from what this one knows."""
        reply = brain_pb2.FrontReply()
        match question.WhichOneof("about"):
            case "explain":
                request_id = RequestId(question.explain)
                try:
                    found = self._dispatcher.explain(request_id, question.tenant)
                except RequestNotFound:
                    return reply
                reply.explanation.CopyFrom(explanation_to_wire(found))
            case "abort":
                request_id = RequestId(question.abort)
                reply.was_aborted = self._dispatcher.abort(request_id, question.tenant)
            case "info":
                reply.info.CopyFrom(self._own_info())
            case "metrics":
                reply.metrics = (await asyncio.to_thread(self._exposition.generate)).decode()
        return reply


def join_infos(own: Info, others: Sequence[Info]) -> Info:
    """Returns figures of several fronts, and of the brain, as those of one router.

    A worker counts that all of them can use.
    """
    joined = Info()
    joined.CopyFrom(own)
    # Fronts say of themselves more than the brain, which counts as the last of the others.
    processes = {process.name: process for process in own.processes}
    for one in others:
        joined.num_fronts += one.num_fronts
        joined.uptime_s = max(joined.uptime_s, one.uptime_s)
        joined.num_prefill = min(joined.num_prefill, one.num_prefill)
        joined.num_decode = min(joined.num_decode, one.num_decode)
        joined.requests_in_flight += one.requests_in_flight
        joined.requests_queued += one.requests_queued
        joined.requests_arrived += one.requests_arrived
        joined.prompt_tokens += one.prompt_tokens
        joined.output_tokens += one.output_tokens
        joined.waiting_tokens += one.waiting_tokens
        joined.oldest_wait_s = max(joined.oldest_wait_s, one.oldest_wait_s)
        for process in one.processes:
            processes.setdefault(process.name, process)
    _set_processes(joined, processes.values())
    return joined


def tell_alone(
    own: Info, brain: RouterProcess, told: Iterable[RouterProcess], told_age_s: float
) -> Info:
    """Returns figures of one front, with what is known of the processes that cannot be asked.

    Args:
        own: of the front.
        brain: how it is.
        told: all processes as they were last told; empty if they never were.
        told_age_s: how long ago.
    """
    alone = Info()
    alone.CopyFrom(own)
    alone.is_partial = True
    known = [*own.processes, brain]
    names = {process.name for process in known}
    others = [
        RouterProcess(name=one.name, pid=one.pid, state="unknown", unheard_s=told_age_s)
        for one in told
        if one.name not in names
    ]
    _set_processes(alone, [*known, *others])
    return alone


def _set_processes(info: Info, processes: Iterable[RouterProcess]) -> None:
    brain_last = sorted(processes, key=lambda one: (one.name == BRAIN, one.name))
    del info.processes[:]
    info.processes.extend(brain_last)
