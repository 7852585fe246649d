"""The main of a rank process: loads, then runs the pool's engine until the face stops it."""

import argparse
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pdserve.cache.cached_granules import CachedGranules
from pdserve.cache.kv_marks import KvMarks
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import ATTENTION_TILE_TOKENS
from pdserve.config.load import tell_by_flags
from pdserve.config.model import KvGeometry, ModelConfig
from pdserve.config.wire import worker_config_from_json
from pdserve.config.worker import WorkerConfig
from pdserve.engine.batch import StepRunner
from pdserve.errors import ConfigError
from pdserve.log import configure_logging
from pdserve.rank.follow import BuildFollower, follow
from pdserve.rank.followers import Followers, RoleChange
from pdserve.rank.inbox import Inbox, read_channel
from pdserve.rank.loading import RankArguments, load_rank
from pdserve.rank.meeting import FolderMeeting, KeyBook, RelayedMeeting
from pdserve.rank.outbox import Outbox
from pdserve.rank.spans import Describe, SpanEngine, SpanRunner, post_noter
from pdserve.rank.step_loop import Engine, StepLoop, is_end
from pdserve.request import Incarnation, Role
from pdserve.rpc.channel import BlockingChannel, ChannelClosed
from pdserve.rpc.v1 import handoff_pb2, rank_pb2
from pdserve.spans import SpanFile, SpanLog
from pdserve.timeline import Clock, MonotonicClock

logger = logging.getLogger(__name__)

FOLLOWERS_WAIT_S = 1.0
SWITCH_INTERVAL_S = 0.0002
"""How long a thread that computes in Python keeps others waiting for their turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """What an engine is built from."""

    config: WorkerConfig
    incarnation: Incarnation
    clock: Clock
    inbox: Inbox
    outbox: Outbox
    model: ModelConfig
    geometry: KvGeometry
    kv: KvTensors
    runner: StepRunner
    max_model_len: int
    marks: KvMarks | None = None
    """In the runner's steps, where frames may leave before a step has ended."""
    followers: Followers | None = None
    """The other ranks; None where there are none."""
    follower_links: tuple[handoff_pb2.LinkEndpoint, ...] = ()
    """Where they listen for links, on decode."""
    full_step_s: float = 0.0
    """A step that uses the whole token budget, as measured at start."""
    spans: SpanLog | None = None
    """Takes the stages of requests, where they are wanted."""
    granules: CachedGranules = field(default_factory=CachedGranules)
    """Is told what the prefix cache holds."""


def run_rank(
    build: Callable[[RankContext], Engine], build_follower: BuildFollower, describe: Describe
) -> int:
    """Runs this process; returns its exit status.

    Args:
        build: makes the engine of rank 0, as the role in its context.
        build_follower: makes what another rank is.
        describe: words for what is posted to the inbox, where spans are wanted.
    """
    config, channel, parsed = _parse_arguments()
    torch.set_num_threads(1)
    # Launching a prompt's kernels keeps the engine thread in Python for 20 ms (H200, 32 layers); by
    # default each step of a link's thread would wait for 5 of them.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    clock = MonotonicClock()
    spans = _open_spans(config, parsed.rank)
    inbox = Inbox(None if spans is None else post_noter(describe, spans, clock))
    outbox, keys = Outbox(channel), KeyBook()
    arguments = _make_arguments(parsed, keys, outbox)
    # From the start: other ranks' keys come over this channel while this one loads.
    read_channel(channel, inbox, keys, has_calls=arguments.rank == 0)
    try:
        if arguments.rank > 0:
            follow(config, arguments, inbox, outbox, build_follower)
        else:
            context = replace(_load(config, arguments, inbox, outbox), spans=spans)
            if spans is not None:
                context = replace(context, runner=SpanRunner(context.runner, spans, clock))
            _lead_on(context, build, describe)
    except ConfigError as error:
        failed = rank_pb2.RankFailed(message=tell_by_flags(error, WorkerConfig), is_user_error=True)
        outbox.send(rank_pb2.FromRank(failed=failed))
        return 2
    except ChannelClosed:
        logger.info("face or rank is gone", extra={"worker_id": config.worker_id})
    except Exception as error:
        logger.exception("rank failed", extra={"worker_id": config.worker_id})
        failed = rank_pb2.RankFailed(message=str(error), is_user_error=False)
        outbox.send(rank_pb2.FromRank(failed=failed))
        return 1
    return 0


def _parse_arguments() -> tuple[WorkerConfig, BlockingChannel, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rank-fds", type=int, nargs="*", default=[])
    parser.add_argument("--group-folder", type=Path, default=None)
    parsed = parser.parse_args()
    config = worker_config_from_json(parsed.config)
    process = f"rank{parsed.rank}" if parsed.rank_fds else "rank"
    fields = {"worker_id": config.worker_id, "process": process}
    configure_logging(config.log_level, fields)
    return config, _channel_of(parsed.channel_fd), parsed


def _make_arguments(parsed: argparse.Namespace, keys: KeyBook, outbox: Outbox) -> RankArguments:
    def tell(key: str, value: bytes) -> None:
        outbox.send(rank_pb2.FromRank(key=rank_pb2.StoreKey(key=key, value=value)))

    folder: Path | None = parsed.group_folder
    return RankArguments(
        incarnation=Incarnation(parsed.incarnation),
        rank=parsed.rank,
        meeting=RelayedMeeting(keys, tell) if folder is None else FolderMeeting(folder),
        rank_channels=tuple(_channel_of(fd) for fd in parsed.rank_fds),
    )


def _channel_of(fd: int) -> BlockingChannel:
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return BlockingChannel(sock)


def _open_spans(config: WorkerConfig, rank: int) -> SpanLog | None:
    if config.span_folder is None:
        return None
    return SpanFile(Path(config.span_folder), f"{config.worker_id}-rank{rank}")


def _lead_on(
    context: RankContext, build: Callable[[RankContext], Engine], describe: Describe
) -> None:
    """Lives as rank 0: in one role, or in one after the other with what is loaded."""
    while True:
        engine = build(context)
        if context.spans is not None:
            engine = SpanEngine(engine, describe, context.spans, context.clock)
        change = _lead(context, engine)
        # Links have ended with their engine: what they still said is of no more use to anyone.
        if change is None or any(is_end(event) for event in context.inbox.drain(0.0)):
            return
        role = Role(change.role)
        logger.info("changes its role", extra={"role": role})
        links: tuple[handoff_pb2.LinkEndpoint, ...] | None = ()
        if context.followers is not None:
            links = _await_followers(context.followers.change_role(change), context.inbox)
        if links is None:
            return
        # Nothing of the KV is kept: the new engine counts all blocks as free.
        context = replace(
            context,
            config=replace(context.config, role=role),
            incarnation=Incarnation(change.incarnation),
            follower_links=links,
            granules=CachedGranules(),
        )


def _await_followers(
    change: RoleChange, inbox: Inbox
) -> tuple[handoff_pb2.LinkEndpoint, ...] | None:
    """Waits until the other ranks have their new role; None: this process is to end instead.

    One that never gets there keeps this rank from saying that it is ready, and so its face from the
    registry: whoever watches the replica's lease kills it.
    """
    while change.links is None:
        for event in inbox.drain(FOLLOWERS_WAIT_S):
            if is_end(event):
                return None
            change.take(event)
    return change.links


def _lead(context: RankContext, engine: Engine) -> rank_pb2.ChangeRole | None:
    """Lives as rank 0 in one role; returns the next one."""
    inbox, outbox = context.inbox, context.outbox
    # What is loaded by now stays: a full collection that walks over all of torch takes 0.1 s, in
    # the middle of somebody's stream.
    gc.collect()
    gc.freeze()
    _announce(context)
    # What was loaded stays: without this, each full collection walks over all of it (tens of
    # milliseconds behind torch and gRPC) while a device waits for its next step.
    gc.collect()
    gc.freeze()
    with closing(engine):
        loop = StepLoop(
            engine,
            inbox,
            outbox,
            context.clock,
            context.config.heartbeat_s / 2,
            full_step_s=context.full_step_s,
            granules=context.granules,
        )
        return loop.run()


def _load(
    config: WorkerConfig, arguments: RankArguments, inbox: Inbox, outbox: Outbox
) -> RankContext:
    clock = MonotonicClock()

    def report(name: str, seconds: float, detail: str) -> None:
        phase = rank_pb2.RankPhase(name=name, seconds=seconds, detail=detail)
        outbox.send(rank_pb2.FromRank(phase=phase))

    loaded = load_rank(config, arguments, clock, report)
    followers: Followers | None = None
    follower_links: tuple[handoff_pb2.LinkEndpoint, ...] = ()
    if loaded.geometry.num_ranks > 1:
        followers = Followers(arguments.rank_channels)
        follower_links = followers.wait_ready()
        followers.read_into(inbox)
    started_s = clock.now()
    announce = None if followers is None else followers.announce
    runner = loaded.make_runner(announce, None if followers is None else followers.results)
    runner.warm_up()
    warm_s = clock.now()
    runner.warm_up()
    tile_s = clock.now() - warm_s
    report("warm up", clock.now() - started_s, "")
    budget = loaded.worker.engine.max_num_batched_tokens
    return RankContext(
        config=loaded.worker,
        incarnation=arguments.incarnation,
        clock=clock,
        inbox=inbox,
        outbox=outbox,
        model=loaded.config,
        geometry=loaded.geometry,
        kv=loaded.kv,
        runner=runner,
        max_model_len=loaded.max_model_len,
        marks=loaded.marks,
        followers=followers,
        follower_links=follower_links,
        full_step_s=tile_s * max(1.0, budget / ATTENTION_TILE_TOKENS),
    )


def _device_name(config: WorkerConfig) -> str:
    return "cpu" if config.engine.device == "cpu" else torch.cuda.get_device_name()


def _announce(context: RankContext) -> None:
    geometry = context.geometry
    ready = rank_pb2.RankReady(
        pid=os.getpid(),
        total_blocks=context.kv.num_blocks,
        max_model_len=context.max_model_len,
        compatibility_digest=geometry.digest(),
        geometry=rank_pb2.KvGeometry(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            dtype=geometry.dtype,
            tensor_parallel=geometry.tensor_parallel,
            pipeline_parallel=geometry.pipeline_parallel,
        ),
        model_revision=geometry.model_revision,
        architecture=context.model.architecture,
        vocab_size=context.model.vocab_size,
        device=_device_name(context.config),
    )
    context.outbox.send(rank_pb2.FromRank(ready=ready))
