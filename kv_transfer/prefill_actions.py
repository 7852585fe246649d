"""The rungs of a prefill hand-off, and what it asks its worker to do."""

from dataclasses import dataclass
from enum import Enum

from kv_transfer.plan import Frame
from kv_transfer.protocol import (
    DecodeTarget,
    Envelope,
    FirstToken,
    LinkEndpoint,
    RefusalReason,
    SampledAhead,
)
from pdserve.request import ReservationId


class PrefillStage(Enum):
    """The rungs of the hand-off ladder."""

    UNPLACED = "unplaced"
    RESERVING = "reserving"
    SENDING = "sending"
    COMMITTED = "committed"
    HANDED_OFF = "handed_off"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    RETURNED = "returned"
    REFUSED = "refused"


TERMINAL_STAGES = frozenset(
    {
        PrefillStage.HANDED_OFF,
        PrefillStage.FINISHED,
        PrefillStage.CANCELLED,
        PrefillStage.RETURNED,
        PrefillStage.REFUSED,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReserve:
    """Call Reserve; hand the outcome to `reserve_answered`."""

    target: DecodeTarget
    envelope: Envelope
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SendCommit:
    """Call Commit; hand the outcome to `commit_answered`. Answered only once all has landed."""

    target: DecodeTarget
    envelope: Envelope
    first_tokens: tuple[FirstToken, ...]
    """One for each sample that goes on."""
    manifest_digest: bytes
    timeout_s: float

    @property
    def ahead(self) -> SampledAhead:
        """The same words for the link, which is faster than the call."""
        assert self.envelope.reservation_id is not None
        return SampledAhead(
            reservation_id=self.envelope.reservation_id,
            first_tokens=self.first_tokens,
            manifest_digest=self.manifest_digest,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SendAbort:
    """Call Abort, once, without waiting: a lost one is covered by the lease."""

    target: DecodeTarget
    envelope: Envelope
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SendRenew:
    """Call Renew (envelopes of one target may share a call); hand the outcome to `renewed`."""

    target: DecodeTarget
    envelope: Envelope
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkUse:
    """One pair of ranks between which frames of a hand-off go."""

    target: DecodeTarget
    endpoint: LinkEndpoint
    prefill_rank: int
    decode_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PushFrame:
    """Pack the frame's blocks and give the copy to the link, as soon as that has room.

    Where links read blocks by themselves, they do so once the step has computed them.
    """

    target: DecodeTarget
    endpoint: LinkEndpoint
    reservation_id: ReservationId
    frame: Frame
    after_step: int | None = None
    """The step in flight that computes it; None: it is computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DropFrames:
    """Forget frames of this reservation that are not on the wire yet."""

    reservation_id: ReservationId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportNeedsPlacement:
    """Tell the router that the request needs another decode worker."""

    detail: str
    decode_attempt: int
    """The attempt that failed."""
    hold_s: float
    retry_after_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportHandedOff:
    """Tell the router that decode owns the sequence now."""

    decode_attempt: int
    handoff_s: float
    """From the first token to the acknowledgement."""
    num_blocks: int
    num_bytes: int
    transfer_s: float | None
    """From sending all frames in one go, or from the end of the step that they were sent in, to the
    acknowledgement; None if they went by and by."""


class ReturnReason(Enum):
    """Why a prefill worker gives a healthy request back."""

    PLACEMENT_TIMEOUT = "placement_timeout"
    TRANSFER_FAILED = "transfer_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportReturned:
    """Tell the router that this attempt is over and the request healthy."""

    reason: ReturnReason
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRefused:
    """Tell the router that the request ends: the decode worker refused it for good."""

    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Give the request's blocks back (to the prefix cache). Emitted exactly once, last."""


PrefillAction = (
    SendReserve
    | SendCommit
    | SendAbort
    | SendRenew
    | PushFrame
    | DropFrames
    | ReportNeedsPlacement
    | ReportHandedOff
    | ReportReturned
    | ReportRefused
    | ReleaseBlocks
)
