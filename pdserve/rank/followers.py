"""The other ranks of a replica, as rank 0 sees them, and rank 0 as they see it."""

import threading
from collections.abc import Sequence

from pdserve.engine.batch import StepPlan
from pdserve.engine.step_codec import PlanEncoder
from pdserve.rank.inbox import ChannelLost, Inbox
from pdserve.rank.step_results import ResultReceiver
from pdserve.rpc.channel import BlockingChannel, ChannelClosed
from pdserve.rpc.v1 import handoff_pb2, rank_pb2


class Followers:
    """Channels to ranks 1 and up. Sends on the engine thread only; what they tell is posted."""

    def __init__(self, channels: Sequence[BlockingChannel]) -> None:
        """Owns the channels, which are in the order of the ranks."""
        self._channels = tuple(channels)
        self._encoder = PlanEncoder()
        self.results = ResultReceiver()
        """Of the last stage, where that samples."""

    def wait_ready(self) -> tuple[handoff_pb2.LinkEndpoint, ...]:
        """Waits until all have loaded; returns where decode ranks listen for links.

        Raises:
            ChannelClosed: one of them died; the face knows why.
        """
        endpoints = []
        for channel in self._channels:
            message = rank_pb2.FromFollower.FromString(channel.receive())
            assert message.HasField("ready")
            endpoints.append(message.ready.link)
        return tuple(endpoints)

    def read_into(self, inbox: Inbox) -> None:
        """Starts to post what they tell. The death of one ends this rank, too."""
        for channel in self._channels:
            thread = threading.Thread(
                target=_read,
                args=(channel, inbox, self.results),
                name="follower-reader",
                daemon=True,
            )
            thread.start()

    def announce(self, plan: StepPlan) -> None:
        """Tells all of them what this rank computes now: they compute it with it.

        Raises:
            ChannelClosed: one of them died.
        """
        message = rank_pb2.ToFollower(step=self._encoder.encode(plan)).SerializeToString()
        for channel in self._channels:
            channel.send(message)

    def change_role(self, change: rank_pb2.ChangeRole) -> "RoleChange":
        """Tells all of them to begin anew as another role, behind whatever they were told before.

        Raises:
            ChannelClosed: one of them died.
        """
        message = rank_pb2.ToFollower(change_role=change).SerializeToString()
        for channel in self._channels:
            channel.send(message)
        return RoleChange(len(self._channels))

    def send(self, rank: int, message: rank_pb2.ToFollower) -> None:
        """Sends an order to one of them.

        Raises:
            ChannelClosed: it died.
        """
        self._channels[rank - 1].send(message.SerializeToString())


class RoleChange:
    """Ranks 1 and up on their way to another role: links of the old one may still say something."""

    def __init__(self, num_ranks: int) -> None:
        """None of them is there yet."""
        self._links: list[handoff_pb2.LinkEndpoint | None] = [None] * num_ranks

    def take(self, event: object) -> None:
        """Notes a rank that is there; what else one says is of its old role, and dropped."""
        if isinstance(event, rank_pb2.FromFollower) and event.HasField("ready"):
            self._links[event.ready.rank - 1] = event.ready.link

    @property
    def links(self) -> tuple[handoff_pb2.LinkEndpoint, ...] | None:
        """Where they listen for links in their new role; None until all are there."""
        found = tuple(link for link in self._links if link is not None)
        return found if len(found) == len(self._links) else None


class Leader:
    """The channel of another rank to rank 0. Any thread may tell."""

    def __init__(self, channel: BlockingChannel) -> None:
        """Owns the channel."""
        self._channel = channel
        self._lock = threading.Lock()

    def tell(self, message: rank_pb2.FromFollower) -> None:
        """Sends.

        Raises:
            ChannelClosed: rank 0 is gone.
        """
        with self._lock:
            self._channel.send(message.SerializeToString())

    def read_into(self, inbox: Inbox) -> None:
        """Starts to post its orders."""

        def read() -> None:
            try:
                while True:
                    inbox.post(rank_pb2.ToFollower.FromString(self._channel.receive()))
            except ChannelClosed:
                inbox.post(ChannelLost())

        threading.Thread(target=read, name="leader-reader", daemon=True).start()


def _read(channel: BlockingChannel, inbox: Inbox, results: ResultReceiver) -> None:
    try:
        while True:
            message = rank_pb2.FromFollower.FromString(channel.receive())
            if message.HasField("step_done"):
                results.post(message.step_done)
            else:
                inbox.post(message)
    except ChannelClosed:
        pass
    finally:
        # However this thread ends: nobody may wait for what it will not read.
        inbox.post(ChannelLost())
        results.close()
