"""Whether a brain and its fronts live: asked by whoever would start them again."""

import socket
from collections.abc import Collection

from google.protobuf.message import DecodeError

from pdserve.rpc.channel import BlockingChannel, ChannelClosed
from pdserve.rpc.v1 import brain_pb2


def feel_pulse(path: str, timeout_s: float) -> Collection[int] | None:
    """Returns the numbers of the fronts whose event loops turn, as their brain hears them.

    None: the brain at this socket does not answer in time, so nothing is known of fronts.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.setblocking(False)
            sock.connect(path)
            channel = BlockingChannel(sock)
            sock.settimeout(timeout_s)
            word = brain_pb2.Word(beat=brain_pb2.BrainBeat())
            channel.send(brain_pb2.Words(words=[word]).SerializeToString())
            answer = brain_pb2.Words.FromString(channel.receive())
        except (OSError, ChannelClosed, DecodeError):
            return None
    beats = [word.beat for word in answer.words if word.HasField("beat")]
    return beats[0].fronts if beats else None
