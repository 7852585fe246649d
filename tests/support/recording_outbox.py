"""What an engine sends, kept for a test to read."""

from collections import deque

from pdserve.request import FrontId
from pdserve.rpc.v1 import rank_pb2, worker_pb2


class RecordingOutbox:
    """Stands in for `Outbox`: keeps what the engine sends."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = [] if log is None else log
        self.sent: deque[rank_pb2.FromRank] = deque()
        self.updates: list[worker_pb2.SequenceUpdate] = []
        self._next_call_id = 1

    def send(self, message: rank_pb2.FromRank) -> None:
        self.sent.append(message)

    def reply(self, call_id: int, reply: rank_pb2.RankReply) -> None:
        self.send(rank_pb2.FromRank(call_id=call_id, reply=reply))

    def refuse(self, call_id: int, error: Exception) -> None:
        wire = rank_pb2.RankError(reason=type(error).__name__, message=str(error))
        self.reply(call_id, rank_pb2.RankReply(error=wire))

    def call_peer(self, call: rank_pb2.PeerCall) -> int:
        call_id = self._next_call_id
        self._next_call_id += 1
        self.log.append(f"call {call.WhichOneof('call')}")
        self.send(rank_pb2.FromRank(call_id=call_id, peer_call=call))
        return call_id

    def update(self, front_id: FrontId, update: worker_pb2.SequenceUpdate) -> None:
        self.updates.append(update)

    def flush(self) -> None:
        """Updates are kept as they come."""
        self.log.append("flush")
