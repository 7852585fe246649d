"""Starts a rank: channel, model, KV memory; then runs the pool's engine until the face stops it."""

import argparse
import logging
import os
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry, ModelConfig
from pdserve.config.wire import worker_config_from_json
from pdserve.config.worker import WorkerConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import ConfigError
from pdserve.log import configure_logging
from pdserve.models.folder import effective_max_model_len, geometry_of, read_model_config
from pdserve.models.registry import load_model
from pdserve.rank.inbox import Inbox, read_channel
from pdserve.rank.outbox import Outbox
from pdserve.rank.step_loop import Engine, StepLoop
from pdserve.request import Incarnation
from pdserve.rpc.channel import BlockingChannel, ChannelClosed
from pdserve.rpc.v1 import rank_pb2
from pdserve.timeline import Clock, MonotonicClock

logger = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 512 * 1024 * 1024


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
    runner: ModelRunner
    max_model_len: int


def run_rank(build: Callable[[RankContext], Engine]) -> int:
    """The main of a rank process; returns its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--config", required=True)
    arguments = parser.parse_args()
    config = worker_config_from_json(arguments.config)
    configure_logging(fields={"worker_id": config.worker_id, "process": "rank"})
    torch.set_num_threads(1)
    sock = socket.socket(fileno=arguments.channel_fd)
    sock.set_inheritable(False)
    channel = BlockingChannel(sock)
    inbox, outbox = Inbox(), Outbox(channel)
    try:
        context = _load(config, Incarnation(arguments.incarnation), inbox, outbox)
        engine = build(context)
        read_channel(channel, inbox)
        _announce(context)
        with closing(engine):
            StepLoop(engine, inbox, outbox, context.clock, config.heartbeat_s / 2).run()
    except ConfigError as error:
        outbox.send(rank_pb2.FromRank(failed=_failure(error, is_user_error=True)))
        return 2
    except ChannelClosed:
        logger.info("face is gone", extra={"worker_id": config.worker_id})
    except Exception as error:
        logger.exception("rank failed", extra={"worker_id": config.worker_id})
        outbox.send(rank_pb2.FromRank(failed=_failure(error, is_user_error=False)))
        return 1
    return 0


def _failure(error: Exception, *, is_user_error: bool) -> rank_pb2.RankFailed:
    return rank_pb2.RankFailed(message=str(error), is_user_error=is_user_error)


def _load(
    config: WorkerConfig, incarnation: Incarnation, inbox: Inbox, outbox: Outbox
) -> RankContext:
    clock = MonotonicClock()
    started_s = clock.now()
    folder = Path(config.engine.model)
    model_config = read_model_config(folder)
    max_model_len = effective_max_model_len(model_config, config.engine.max_model_len)
    geometry = geometry_of(model_config, config.engine)
    model = load_model(folder, config.engine)
    _report(outbox, "load weights", clock.now() - started_s, config.engine.dtype)
    started_s = clock.now()
    num_blocks = _num_blocks(config, geometry)
    kv = KvTensors(geometry, num_blocks)
    room = num_blocks * geometry.block_size
    _report(outbox, "allocate KV", clock.now() - started_s, f"{room} tokens in {num_blocks} blocks")
    started_s = clock.now()
    runner = ModelRunner(model, kv)
    runner.warm_up()
    _report(outbox, "warm up", clock.now() - started_s, "")
    return RankContext(
        config=config,
        incarnation=incarnation,
        clock=clock,
        inbox=inbox,
        outbox=outbox,
        model=model_config,
        geometry=geometry,
        kv=kv,
        runner=runner,
        max_model_len=min(max_model_len, room),
    )


def _num_blocks(config: WorkerConfig, geometry: KvGeometry) -> int:
    kv_bytes = config.engine.kv_cache_memory_bytes or DEFAULT_KV_BYTES
    num_blocks = kv_bytes // geometry.bytes_per_block
    if num_blocks < 2:
        least = 2 * geometry.bytes_per_block
        raise ConfigError(
            f"kv_cache_memory must be at least {least} bytes (two KV blocks), got {kv_bytes}"
        )
    return num_blocks


def _report(outbox: Outbox, name: str, seconds: float, detail: str) -> None:
    phase = rank_pb2.RankPhase(name=name, seconds=seconds, detail=detail)
    outbox.send(rank_pb2.FromRank(phase=phase))


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
    )
    context.outbox.send(rank_pb2.FromRank(ready=ready))
