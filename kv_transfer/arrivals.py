"""What comes over one link, on its way to the engine."""

import time
from collections.abc import Callable

from kv_transfer import codec
from kv_transfer.events import FrameLanded, FramePlaced, LinkId, Post, TokensTold
from kv_transfer.expected_frames import ExpectationBook
from kv_transfer.link_device import Mark
from kv_transfer.notices import LinkBroken
from pdserve.cache.kv_region import KvRegion
from pdserve.request import ReservationId
from pdserve.rpc.v1 import link_pb2


class Arrivals:
    """Tells the engine of frames and words, and counts them. The link's thread only."""

    def __init__(self, link_id: LinkId, rank: int, expected: ExpectationBook, post: Post) -> None:
        """Starts with nothing.

        Args:
            link_id: of the link.
            rank: of this process in its worker.
            expected: what may be written at once.
            post: the engine's inbox.
        """
        self._link_id = link_id
        self._rank = rank
        self._expected = expected
        self._post = post
        self.num_bytes = 0
        self.last_at_s = time.monotonic()
        """When the last frame landed."""

    def place(self, ready: link_pb2.FrameReady, launch: Callable[[KvRegion], Mark]) -> bool:
        """Launches the writing of a frame to its blocks, if it is expected."""
        reservation_id = ReservationId(ready.reservation_id)
        return self._expected.place(
            self._link_id, reservation_id, ready.frame_index, ready.num_bytes, launch
        )

    def note_placed(self, ready: link_pb2.FrameReady, *, is_intact: bool) -> None:
        """Tells of a frame that lies in its blocks."""
        self._note(ready)
        self._post(
            FramePlaced(
                link=self._link_id,
                reservation_id=ReservationId(ready.reservation_id),
                frame_index=ready.frame_index,
                num_bytes=ready.num_bytes,
                is_intact=is_intact,
            )
        )

    def note_landed(self, ready: link_pb2.FrameReady, slot: int, *, is_intact: bool) -> None:
        """Tells of a frame that lies in a slot."""
        self._note(ready)
        self._post(
            FrameLanded(
                link=self._link_id,
                reservation_id=ReservationId(ready.reservation_id),
                frame_index=ready.frame_index,
                num_bytes=ready.num_bytes,
                slot=slot,
                is_intact=is_intact,
            )
        )

    def note_told(self, sampled: link_pb2.TokensSampled) -> None:
        """Passes first tokens on.

        Raises:
            LinkBroken: they are none, or not for this rank.
        """
        if self._rank != 0:
            raise LinkBroken("first tokens are told to rank 0 alone")
        try:
            words = codec.sampled_from_wire(sampled)
        except ValueError as error:
            raise LinkBroken(str(error)) from error
        self._post(TokensTold(link=self._link_id, words=words))

    def _note(self, ready: link_pb2.FrameReady) -> None:
        self.num_bytes += ready.num_bytes
        self.last_at_s = time.monotonic()
