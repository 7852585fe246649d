"""Whether a brain lives: asked by whoever would start it again."""

import socket

from google.protobuf.message import DecodeError

from pdserve.rpc.channel import BlockingChannel, ChannelClosed
from pdserve.rpc.v1 import brain_pb2


def has_pulse(path: str, timeout_s: float) -> bool:
    """Says whether the brain at a socket answers in time; its event loop turns, then."""
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
            return False
    return any(word.HasField("beat") for word in answer.words)
