"""The life of a rank that is not the first: it loads its part and does what rank 0 says."""

import gc
import logging
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve.cache.kv_marks import KvMarks
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry
from pdserve.config.worker import WorkerConfig
from pdserve.engine.step_codec import PlanDecoder
from pdserve.rank.followers import Leader
from pdserve.rank.inbox import ChannelLost, Inbox
from pdserve.rank.loading import RankArguments, load_rank
from pdserve.rank.outbox import Outbox
from pdserve.rank.step_results import ResultSender
from pdserve.request import Incarnation, Role
from pdserve.rpc.v1 import handoff_pb2, rank_pb2
from pdserve.timeline import MonotonicClock

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0


class Follower(Protocol):
    """What such a rank does with orders and its links' events."""

    @property
    def link(self) -> handoff_pb2.LinkEndpoint | None:
        """Where it listens for links, on decode."""
        ...

    def handle(self, event: object) -> None:
        """Takes an order of rank 0, or an event of a link."""
        ...

    def close(self) -> None:
        """Ends all links."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerContext:
    """What a follower is built from."""

    config: WorkerConfig
    incarnation: Incarnation
    rank: int
    inbox: Inbox
    geometry: KvGeometry
    kv: KvTensors
    marks: KvMarks | None
    """In this rank's steps, where frames may leave before a step has ended."""
    compute: Callable[[rank_pb2.StepWork], None]
    tell: Callable[[rank_pb2.FromFollower], None]
    """Sends to rank 0."""


BuildFollower = Callable[[FollowerContext], Follower]


def follow(
    config: WorkerConfig,
    arguments: RankArguments,
    inbox: Inbox,
    outbox: Outbox,
    build: BuildFollower,
) -> None:
    """Lives until rank 0 is gone, in one role, or in one after the other with what is loaded.

    Raises:
        ConfigError: the user can mend it.
        ChannelClosed: rank 0 or the face died while something was sent to it.
    """
    loaded = load_rank(config, arguments, MonotonicClock(), _say_nothing)
    leader = Leader(arguments.rank_channels[0])
    runner = loaded.make_runner(None, ResultSender(leader.tell, inbox))
    decoder = PlanDecoder()

    def compute(work: rank_pb2.StepWork) -> None:
        runner.compute(decoder.decode(work))

    context = FollowerContext(
        config=loaded.worker,
        incarnation=arguments.incarnation,
        rank=arguments.rank,
        inbox=inbox,
        geometry=loaded.geometry,
        kv=loaded.kv,
        marks=loaded.marks,
        compute=compute,
        tell=leader.tell,
    )
    is_first = True
    while True:
        with closing(build(context)) as follower:
            # As on rank 0: all ranks wait for one whose collector walks over what was loaded.
            gc.collect()
            gc.freeze()
            ready = rank_pb2.FollowerReady(link=follower.link, rank=arguments.rank)
            leader.tell(rank_pb2.FromFollower(ready=ready))
            if is_first:
                leader.read_into(inbox)
                outbox.send(rank_pb2.FromRank(ready=rank_pb2.RankReady(pid=os.getpid())))
                is_first = False
            change = _obey(follower, inbox)
        # Links have ended with their follower: what they still said is of no more use to anyone.
        if change is None or any(isinstance(event, ChannelLost) for event in inbox.drain(0.0)):
            return
        role = Role(change.role)
        logger.info("changes its role", extra={"role": role})
        context = replace(
            context,
            config=replace(context.config, role=role),
            incarnation=Incarnation(change.incarnation),
        )


def _obey(follower: Follower, inbox: Inbox) -> rank_pb2.ChangeRole | None:
    """Does what rank 0 says until it is gone, or wants another role; returns which one."""
    while True:
        for event in inbox.drain(IDLE_WAIT_S):
            if isinstance(event, ChannelLost):
                return None
            if isinstance(event, rank_pb2.ToFollower) and event.HasField("change_role"):
                return event.change_role
            follower.handle(event)


def _say_nothing(name: str, seconds: float, detail: str) -> None:
    """Rank 0 reports for all of them."""
