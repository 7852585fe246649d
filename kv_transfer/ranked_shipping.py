"""The memories and links of all ranks of a replica, as rank 0 reaches them.

Orders go to the other ranks on the channel that carries their steps: what a rank packs is what the
steps before the order computed, and no later step can overwrite it first.
"""

from collections.abc import Callable, Sequence

from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkEnds
from kv_transfer.expected_frames import ExpectedFrames
from kv_transfer.follower_codec import landed_to_wire, peer_to_wire, ship_to_wire, unload_to_wire
from kv_transfer.protocol import LinkEndpoint, SampledAhead
from kv_transfer.shipping import RankShipper, RankUnloader, ShipFrame, UnloadFrame
from kv_transfer.transport import LinkPeer, LinkStatus
from pdserve.request import Incarnation, ReservationId
from pdserve.rpc.v1 import rank_pb2

SendTo = Callable[[int, rank_pb2.ToFollower], None]
"""Sends an order to a rank; rank 0 is not among them."""


class RankedShipper:
    """A `Shipper` over several ranks. Counts what each other rank has been told to send."""

    def __init__(
        self, local: RankShipper, send: SendTo, num_ranks: int, max_in_flight: int
    ) -> None:
        """`max_in_flight`: frames that a rank may hold for one link."""
        self._local = local
        self._send = send
        self._num_ranks = num_ranks
        self._max_in_flight = max_in_flight
        self._in_flight: dict[LinkEnds, set[tuple[ReservationId, int]]] = {}

    def has_room(self, ends: LinkEnds) -> bool:
        """Says whether one more frame may be shipped between two ranks now."""
        if ends.own_rank == 0:
            return self._local.has_room(ends)
        return len(self._in_flight.get(ends, ())) < self._max_in_flight

    def open(self, prefill_rank: int, peer: LinkPeer) -> None:
        """Begins to make a link on any rank."""
        if prefill_rank == 0:
            self._local.open(prefill_rank, peer)
            return
        order = rank_pb2.OpenLink(peer=peer_to_wire(peer))
        self._send(prefill_rank, rank_pb2.ToFollower(open_link=order))

    def ship(self, order: ShipFrame) -> None:
        """Ships a frame from any rank."""
        if order.prefill_rank == 0:
            self._local.ship(order)
            return
        ends = LinkEnds(order.peer.incarnation, order.peer.rank, order.prefill_rank)
        key = (order.reservation_id, order.frame_index)
        self._in_flight.setdefault(ends, set()).add(key)
        self._send(order.prefill_rank, rank_pb2.ToFollower(ship=ship_to_wire(order)))

    def tell(self, peer: Incarnation, words: SampledAhead) -> None:
        """Tells first tokens from here: this is rank 0."""
        self._local.tell(peer, words)

    def take(self, event: FrameSent | LinkDown) -> None:
        """Notes what is not in flight any more."""
        ends = event.link.ends
        if isinstance(event, LinkDown):
            self._in_flight.pop(ends, None)
        elif ends in self._in_flight:
            self._in_flight[ends].discard((event.reservation_id, event.frame_index))

    def cancel(self, reservation_id: ReservationId) -> None:
        """Drops queued frames of a reservation on all ranks, silently."""
        self._local.cancel(reservation_id)
        for keys in self._in_flight.values():
            keys.difference_update([key for key in keys if key[0] == reservation_id])
        order = rank_pb2.CancelFrames(reservation_id=reservation_id)
        for rank in range(1, self._num_ranks):
            self._send(rank, rank_pb2.ToFollower(cancel_frames=order))

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists the live links of rank 0."""
        return self._local.links()

    def close(self) -> None:
        """Ends the links of rank 0; other ranks end theirs when their channel closes."""
        self._local.close()


class RankedUnloader:
    """An `Unloader` over several ranks."""

    def __init__(
        self, local: RankUnloader, send: SendTo, follower_endpoints: Sequence[LinkEndpoint]
    ) -> None:
        """`follower_endpoints`: where ranks 1 and up listen."""
        self._local = local
        self._send = send
        self._endpoints = (*local.endpoints(), *follower_endpoints)

    def endpoints(self) -> tuple[LinkEndpoint, ...]:
        """Returns where the ranks listen for links, in their order."""
        return self._endpoints

    def expect(self, expected: ExpectedFrames) -> None:
        """Lets frames of this rank be written as they land; those of others wait for orders."""
        self._local.expect(expected)

    def withdraw(self, reservation_id: ReservationId) -> None:
        """Ends that."""
        self._local.withdraw(reservation_id)

    def unload(self, order: UnloadFrame) -> bool:
        """Unloads here at once, or tells the rank where the frame landed."""
        rank = order.landed.link.own_rank
        if rank == 0:
            return self._local.unload(order)
        self._send(rank, rank_pb2.ToFollower(unload=unload_to_wire(order)))
        return False

    def reject(self, landed: FrameLanded) -> None:
        """Frees the slot on whatever rank it is."""
        rank = landed.link.own_rank
        if rank == 0:
            self._local.reject(landed)
        else:
            self._send(rank, rank_pb2.ToFollower(reject=landed_to_wire(landed)))

    def links(self) -> tuple[LinkStatus, ...]:
        """Lists the live links of rank 0."""
        return self._local.links()

    def close(self) -> None:
        """Ends the links of rank 0; other ranks end theirs when their channel closes."""
        self._local.close()
