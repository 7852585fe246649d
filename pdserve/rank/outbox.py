"""What the engine thread sends to its face: replies at once, token updates once per turn."""

from pdserve.cache.cached_granules import GranuleChanges
from pdserve.errors import PdserveError
from pdserve.request import FrontId
from pdserve.rpc.channel import BlockingChannel
from pdserve.rpc.codec import error_to_wire
from pdserve.rpc.v1 import rank_pb2, worker_pb2

MAX_CHANGES = 4096
"""In one message."""


class Outbox:
    """Engine thread only."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        self._updates: list[rank_pb2.RankUpdate] = []
        self._next_call_id = 1

    def send(self, message: rank_pb2.FromRank) -> None:
        """Sends now; this alone any thread may do."""
        self._channel.send(message.SerializeToString())

    def reply(self, call_id: int, reply: rank_pb2.RankReply) -> None:
        """Answers a call of the face."""
        self.send(rank_pb2.FromRank(call_id=call_id, reply=reply))

    def refuse(self, call_id: int, error: PdserveError) -> None:
        """Answers a call of the face with an error."""
        self.reply(call_id, rank_pb2.RankReply(error=error_to_wire(error)))

    def call_peer(self, call: rank_pb2.PeerCall) -> int:
        """Asks the face to call another worker; the PeerReply carries the returned id."""
        call_id = self._next_call_id
        self._next_call_id += 1
        self.send(rank_pb2.FromRank(call_id=call_id, peer_call=call))
        return call_id

    def update(self, front_id: FrontId, update: worker_pb2.SequenceUpdate) -> None:
        """Adds an update to this turn's message."""
        self._updates.append(rank_pb2.RankUpdate(front_id=front_id, update=update))

    def flush(self) -> None:
        """Sends this turn's updates, if any."""
        if self._updates:
            updates = rank_pb2.RankUpdates(updates=self._updates)
            self.send(rank_pb2.FromRank(updates=updates))
            self._updates = []

    def tell_cached(self, changes: GranuleChanges) -> None:
        """Sends this turn's changes of the prefix cache, if any."""
        for start in range(0, len(changes), MAX_CHANGES):
            end = start + MAX_CHANGES
            message = rank_pb2.CacheChanges(
                keys=changes.keys[start:end].tobytes(),
                is_removed=bytes(changes.is_removed[start:end]),
            )
            self.send(rank_pb2.FromRank(cache_changes=message))
