"""The ranks of one replica without faces: rank 0 in this process, the others as its children.

    with start_ranks(engine) as stand: ...     the stand's runner tells the others of each step

Each child sees a GPU of its own, as a rank of a worker does; this process must compute on GPU 0.
On a CPU there are the same processes.
"""

import gc
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu_harness import Stand
from pdserve.config.engine import EngineConfig
from pdserve.config.wire import worker_config_from_json, worker_config_to_json
from pdserve.config.worker import WorkerConfig
from pdserve.cuda.backend import CudaBackend
from pdserve.engine.step_codec import PlanDecoder
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.rank.backend import LoadedParts, LoadJob, ReportPhase
from pdserve.rank.exchange import RankExchange
from pdserve.rank.followers import Followers, Leader
from pdserve.rank.inbox import Inbox
from pdserve.rank.loading import RankArguments, load_rank, make_device_shard
from pdserve.rank.meeting import FolderMeeting
from pdserve.rank.startup import SWITCH_INTERVAL_S
from pdserve.rank.step_results import ResultSender
from pdserve.request import Incarnation, Role
from pdserve.rpc.channel import BlockingChannel, ChannelClosed, make_pair
from pdserve.rpc.v1 import rank_pb2
from pdserve.timeline import MonotonicClock

STOP_TIMEOUT_S = 30.0


@contextmanager
def start_ranks(engine: EngineConfig, report: ReportPhase) -> Iterator[Stand]:
    """Starts and loads all ranks, and ends them.

    Args:
        engine: says how many tensor ranks and stages there are.
        report: takes the phases of rank 0's start.
    """
    _behave_as_rank()
    with tempfile.TemporaryDirectory() as folder:
        children, channels = _start_children(engine, Path(folder))
        try:
            loaded = _load(engine, 0, Path(folder), report)
            followers = Followers(channels)
            followers.read_into(Inbox())
            runner = loaded.make_runner(followers.announce, followers.results)
            runner.warm_up()
            _settle(loaded, engine, 0)
            config = read_model_config(Path(engine.model))
            yield Stand(
                runner=runner,
                engine=engine,
                num_blocks=loaded.kv.num_blocks,
                vocab_size=config.vocab_size,
            )
        finally:
            for channel in channels:
                channel.close()
            for child in children:
                try:
                    child.wait(STOP_TIMEOUT_S)
                finally:
                    child.kill()


def _start_children(
    engine: EngineConfig, folder: Path
) -> tuple[list[subprocess.Popen[bytes]], list[BlockingChannel]]:
    worker = _worker_of(engine)
    children, channels = [], []
    for rank in range(1, engine.tensor_parallel * engine.pipeline_parallel):
        ours, theirs = make_pair()
        argv = [sys.executable, "-m", "benchmarks.rank_group"]
        argv += [worker_config_to_json(worker), str(rank), str(folder), str(theirs.fileno())]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)}
        children.append(subprocess.Popen(argv, pass_fds=(theirs.fileno(),), env=environment))
        theirs.close()
        channels.append(BlockingChannel(ours))
    return children, channels


def _worker_of(engine: EngineConfig) -> WorkerConfig:
    return WorkerConfig(role=Role.DECODE, worker_id="bench", engine=engine, redis_url="")


def _load(engine: EngineConfig, rank: int, folder: Path, report: ReportPhase) -> LoadedParts:
    if engine.device == "cpu":
        arguments = RankArguments(
            incarnation=Incarnation(1), rank=rank, meeting=FolderMeeting(folder), rank_channels=()
        )
        loaded = load_rank(_worker_of(engine), arguments, MonotonicClock(), report)
        return LoadedParts(kv=loaded.kv, make_runner=loaded.make_runner)
    model = Path(engine.model)
    config = read_model_config(model)
    geometry = geometry_of(config, engine)
    store = FolderMeeting(folder).store("exchange", geometry.num_ranks)
    job = LoadJob(
        folder=model,
        engine=engine,
        model=config,
        geometry=geometry,
        part=geometry.parts[rank],
        shard=make_device_shard(config, geometry, rank),
        max_model_len=config.max_position,
        exchange=RankExchange(store, rank, geometry.num_ranks),
    )
    return CudaBackend(None).load(job, MonotonicClock(), report)


def _behave_as_rank() -> None:
    """Sets what a rank process sets for itself."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _settle(loaded: LoadedParts, engine: EngineConfig, rank: int) -> None:
    """Zeros in the KV would let the chip run cooler than it does at work."""
    geometry = geometry_of(read_model_config(Path(engine.model)), engine)
    for layer in range(len(geometry.parts[rank].layers)):
        for part in loaded.kv.layer(layer):
            part.normal_()
    if engine.device == "cuda":
        torch.cuda.synchronize()
    # As a rank does once it is loaded.
    gc.collect()
    gc.freeze()


def main() -> None:
    """Lives as one of the other ranks, until rank 0 is gone."""
    config, rank, folder, fd = sys.argv[1:]
    _behave_as_rank()
    engine = worker_config_from_json(config).engine
    channel = BlockingChannel(socket.socket(fileno=int(fd)))
    loaded = _load(engine, int(rank), Path(folder), lambda name, seconds, detail: None)
    runner = loaded.make_runner(None, ResultSender(Leader(channel).tell, Inbox()))
    decoder = PlanDecoder()
    is_settled = False
    try:
        while True:
            message = rank_pb2.ToFollower.FromString(channel.receive())
            runner.compute(decoder.decode(message.step))
            if not is_settled:
                _settle(loaded, engine, int(rank))
                is_settled = True
    except ChannelClosed:
        return


if __name__ == "__main__":
    main()
