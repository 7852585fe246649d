"""What the decode side of the hand-off asks its worker to do."""

from dataclasses import dataclass

from kv_transfer.events import FrameLanded
from kv_transfer.plan import Frame
from kv_transfer.protocol import Acknowledged, Envelope, FirstToken, Grant, HandoffAborted, Refusal
from pdserve.request import Incarnation, Request, ReservationId


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerReserve:
    """Answer a Reserve call."""

    call_id: int
    answer: Grant | Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class Expect:
    """A new reservation: links may write its frames as they land, until its blocks are released."""

    reservation_id: ReservationId
    peer: Incarnation
    """Of the prefill worker."""
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerCommit:
    """Answer a Commit call that was kept waiting."""

    call_id: int
    answer: Acknowledged | HandoffAborted


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    """Copy a landed frame into the reservation's blocks, free the slot, call `frame_scattered`."""

    reservation_id: ReservationId
    frame: Frame
    landed: FrameLanded


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectFrame:
    """Free the slot of a frame that must touch no block."""

    landed: FrameLanded
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The KV of the whole prompt is there: run its samples. The blocks are the scheduler's now."""

    reservation_id: ReservationId
    envelope: Envelope
    request: Request
    first_tokens: tuple[FirstToken, ...]
    """One for each sample that goes on."""


DecodeAction = AnswerReserve | Expect | AnswerCommit | Scatter | RejectFrame | Start


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOutcome:
    """What a cancel met, and what it causes."""

    was_known: bool
    """True: a reservation of this request was dropped."""
    actions: list[DecodeAction]
