"""What a decode worker knows of one reservation."""

from dataclasses import dataclass, field

from kv_transfer.events import FrameLanded, FramePlaced, LinkEnds, LinkId, TokensTold
from kv_transfer.plan import Manifest
from kv_transfer.protocol import Envelope, FirstToken, Grant
from pdserve.request import Request, ReservationId


@dataclass(kw_only=True, slots=True)
class Reservation:
    """Blocks held for one hand-off attempt, and what has come for it."""

    envelope: Envelope
    """As it came with the Reserve call."""
    request: Request
    grant: Grant
    manifest: Manifest
    expires_at_s: float
    landed: set[int] = field(default_factory=set)
    """Frames that were accepted."""
    scattering: set[int] = field(default_factory=set)
    """Accepted frames whose copy into the blocks is not confirmed."""
    links: dict[LinkEnds, LinkId] = field(default_factory=dict)
    """Over which the latest frame of each pair of ranks came."""
    first_tokens: tuple[FirstToken, ...] = ()
    """Empty before the commit."""
    waiting_calls: list[int] = field(default_factory=list)
    """Commit calls to answer."""
    is_aborting: bool = False
    """True: dropped; the blocks wait for pending scatters, then they are free."""

    @property
    def reservation_id(self) -> ReservationId:
        """The id in its grant."""
        return self.grant.reservation_id

    @property
    def has_all_frames(self) -> bool:
        """True when the bitmap is full."""
        return len(self.landed) == len(self.manifest.frames)

    @property
    def has_landed(self) -> bool:
        """True when every frame is in its blocks."""
        return self.has_all_frames and not self.scattering

    def misses_frames_of(self, ends: LinkEnds) -> bool:
        """Says whether a frame between these ranks has not come."""
        return any(
            frame.index not in self.landed
            and (frame.prefill_rank, frame.decode_rank) == (ends.peer_rank, ends.own_rank)
            for frame in self.manifest.frames
        )

    def is_from(self, envelope: Envelope) -> bool:
        """Says whether an envelope comes from the worker that reserved."""
        mine = self.envelope
        return (
            mine.handoff_id == envelope.handoff_id
            and mine.prefill_worker_id == envelope.prefill_worker_id
            and mine.prefill_incarnation == envelope.prefill_incarnation
            and mine.tenant_salt_digest == envelope.tenant_salt_digest
            and mine.compatibility_digest == envelope.compatibility_digest
        )

    def find_fault(self, landed: FrameLanded | FramePlaced) -> str | None:
        """Says what is wrong with a frame; None accepts it."""
        if not 0 <= landed.frame_index < len(self.manifest.frames):
            return "no such frame"
        if landed.frame_index in self.landed:
            return "came twice"
        frame = self.manifest.frames[landed.frame_index]
        link = landed.link
        if (frame.prefill_rank, frame.decode_rank) != (link.peer_rank, link.own_rank):
            return f"came over the link of ranks {link.peer_rank} and {link.own_rank}"
        if landed.num_bytes != frame.num_bytes:
            return f"{landed.num_bytes} bytes instead of {frame.num_bytes}"
        if not landed.is_intact:
            return "checksum differs"
        return None

    def takes_at_its_word(self, told: TokensTold) -> bool:
        """Says whether first tokens come from its prefill worker, fit, and are news."""
        if self.is_aborting or self.first_tokens:
            return False
        is_mine = self.envelope.prefill_incarnation == told.link.peer
        return is_mine and told.words.manifest_digest == self.manifest.digest
