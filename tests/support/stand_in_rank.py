"""A rank without an engine, for tests of what a face tells its ranks: says what it sees, and waits.

It is ready at once, with a phase for each of its variables in front.
"""

import argparse
import os
import socket

from pdserve.rpc.channel import BlockingChannel, ChannelClosed
from pdserve.rpc.v1 import rank_pb2

SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    options, _ = parser.parse_known_args()
    channel = BlockingChannel(socket.socket(fileno=options.channel_fd))
    for name in SHOWN:
        phase = rank_pb2.RankPhase(name=f"{options.rank} {name}", detail=os.environ.get(name, ""))
        channel.send(rank_pb2.FromRank(phase=phase).SerializeToString())
    ready = rank_pb2.RankReady(pid=os.getpid())
    channel.send(rank_pb2.FromRank(ready=ready).SerializeToString())
    try:
        while True:
            if rank_pb2.ToRank.FromString(channel.receive()).HasField("shutdown"):
                return
    except ChannelClosed:
        return


if __name__ == "__main__":
    main()
