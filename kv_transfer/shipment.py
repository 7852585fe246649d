"""What one decode worker is sent of a hand-off: the frames of its grant, and how far they are."""

from dataclasses import dataclass, field

from kv_transfer.computing import ComputedKv
from kv_transfer.grants import list_links
from kv_transfer.plan import Manifest
from kv_transfer.prefill_actions import LinkUse, PushFrame
from kv_transfer.protocol import DecodeTarget, Grant
from pdserve.request import ReservationId


@dataclass(kw_only=True, slots=True)
class Shipment:
    """Frames on their way to one reservation, in order."""

    target: DecodeTarget
    grant: Grant
    manifest: Manifest
    pushed_whole_at_s: float | None = None
    """When its first frames were pushed, if those were all."""
    _num_pushed: int = 0
    _sent: set[int] = field(default_factory=set)

    @property
    def reservation_id(self) -> ReservationId:
        """The reservation on decode."""
        return self.grant.reservation_id

    @property
    def links(self) -> tuple[LinkUse, ...]:
        """The links that its frames take."""
        return list_links(self.manifest, self.grant, self.target)

    @property
    def has_unsent_frames(self) -> bool:
        """Says whether a link still has frames to send."""
        return len(self._sent) < self._num_pushed

    def note_sent(self, frame_index: int) -> None:
        """Notes that a link has sent a frame."""
        self._sent.add(frame_index)

    def push(self, computed: ComputedKv, now_s: float) -> list[PushFrame]:
        """Returns the frames that have become ready since the last time."""
        num_ready = self.manifest.count_ready(computed.num_expected)
        frames = self.manifest.frames[self._num_pushed : num_ready]
        if not self._num_pushed:
            is_whole = num_ready == len(self.manifest.frames)
            self.pushed_whole_at_s = now_s if is_whole else None
        self._num_pushed = max(self._num_pushed, num_ready)
        return [
            PushFrame(
                target=self.target,
                endpoint=self.grant.links[frame.decode_rank],
                reservation_id=self.grant.reservation_id,
                frame=frame,
                after_step=computed.step_for(frame.end_token),
            )
            for frame in frames
        ]
