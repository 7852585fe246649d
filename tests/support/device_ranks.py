"""The CUDA engine as several ranks, a process each: interpreted on the CPU, or on GPUs.

Rank 0 is the calling process; the others obey it as followers do, over the same channels. Where
there are fewer GPUs than ranks, they share them.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.config.wire import worker_config_from_json, worker_config_to_json
from pdserve.config.worker import WorkerConfig
from pdserve.cuda.backend import make_runner
from pdserve.cuda.device import Device
from pdserve.cuda.parts import make_parts
from pdserve.cuda.runner import CudaRunner
from pdserve.cuda.tensor_ranks import share_files
from pdserve.cuda.wires import MakeWires, connect_nccl_wires
from pdserve.engine.step_codec import PlanDecoder
from pdserve.models.folder import geometry_of
from pdserve.rank.exchange import RankExchange
from pdserve.rank.followers import Followers, Leader
from pdserve.rank.inbox import Inbox
from pdserve.rank.loading import make_device_shard
from pdserve.rank.meeting import FolderMeeting
from pdserve.rank.step_results import ResultSender
from pdserve.request import Role
from pdserve.rpc.channel import BlockingChannel, ChannelClosed, make_pair
from pdserve.rpc.v1 import rank_pb2
from pdserve.timeline import MonotonicClock
from tests.support.cuda_engine import make_job
from tests.support.gpus import gpu_of
from tests.support.socket_wires import socket_wires

TIMEOUT_S = 60.0
FAR = "+far"


def make_rank(
    engine: EngineConfig, rank: int, meeting_folder: Path, num_blocks: int, device: str
) -> CudaRunner:
    """Makes the runner of one rank; all must do so at once.

    A device whose name ends with `FAR` has its stages joined as if they were on several hosts.
    """
    device, *far = device.split(FAR)
    folder = Path(engine.model)
    job = make_job(folder, engine)
    geometry = geometry_of(job.model, engine)
    store = FolderMeeting(meeting_folder).store("exchange", geometry.num_ranks)
    job = replace(
        job,
        geometry=geometry,
        part=geometry.parts[rank],
        shard=make_device_shard(job.model, geometry, rank),
        exchange=RankExchange(store, rank, geometry.num_ranks),
    )
    place = Device(torch.device(device))
    kind = None if place.is_cuda else share_files(meeting_folder, f"ring-{rank}")
    wires: MakeWires | None = None
    if far:
        wires = connect_nccl_wires if place.is_cuda else socket_wires(meeting_folder)
    parts = make_parts(
        job,
        place,
        MonotonicClock(),
        lambda name, seconds, detail: None,
        kind,
        make_wires=wires,
    )
    kv = KvTensors(geometry, num_blocks, job.part, place.torch_device)
    runner = make_runner(job, parts, kv)
    if parts.shapes:
        runner.capture()
    return runner


class RankChildren:
    """Ranks 1 and up."""

    def __init__(self, engine: EngineConfig, folder: Path, num_blocks: int, device: str) -> None:
        worker = WorkerConfig(role=Role.DECODE, worker_id="test", engine=engine, redis_url="")
        self.processes: list[subprocess.Popen[bytes]] = []
        channels: list[BlockingChannel] = []
        for rank in range(1, engine.tensor_parallel * engine.pipeline_parallel):
            ours, theirs = make_pair()
            argv = [sys.executable, "-m", "tests.support.device_ranks"]
            argv += [worker_config_to_json(worker), str(rank), str(folder)]
            argv += [str(num_blocks), device, str(theirs.fileno())]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu_of(rank)}
            self.processes.append(
                subprocess.Popen(argv, pass_fds=(theirs.fileno(),), env=environment)
            )
            theirs.close()
            channels.append(BlockingChannel(ours))
        self._channels = channels
        self.followers = Followers(channels)
        self.followers.read_into(Inbox())

    def close(self) -> None:
        """Ends them as the end of rank 0 does."""
        for channel in self._channels:
            channel.close()
        for process in self.processes:
            try:
                process.wait(TIMEOUT_S)
            finally:
                process.kill()
                process.wait()


@contextmanager
def device_ranks(
    engine: EngineConfig, meeting_folder: Path, num_blocks: int = 32, device: str = "cpu"
) -> Iterator[tuple[CudaRunner, RankChildren]]:
    """Yields rank 0's runner, whose steps the others take part in."""
    meeting_folder.mkdir()
    children = RankChildren(engine, meeting_folder, num_blocks, device)
    try:
        runner = make_rank(engine, 0, meeting_folder, num_blocks, device)
        runner.announce = children.followers.announce
        runner.results = children.followers.results
        yield runner, children
    finally:
        children.close()


def main() -> None:
    """Lives as another rank until rank 0 is gone."""
    config, rank, folder, num_blocks, device, fd = sys.argv[1:]
    worker = worker_config_from_json(config)
    channel = BlockingChannel(socket.socket(fileno=int(fd)))
    runner = make_rank(worker.engine, int(rank), Path(folder), int(num_blocks), device)
    runner.results = ResultSender(Leader(channel).tell, Inbox())
    decoder = PlanDecoder()
    try:
        while True:
            message = rank_pb2.ToFollower.FromString(channel.receive())
            runner.compute(decoder.decode(message.step))
    except ChannelClosed:
        return


if __name__ == "__main__":
    if any(word.startswith("cpu") for word in sys.argv):
        from tests.unit.kernels import conftest  # noqa: F401  mends the interpreter
    main()
