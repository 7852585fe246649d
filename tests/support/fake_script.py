"""What goes wrong on a fake worker."""

from dataclasses import dataclass, field

from pdserve.errors import Overloaded, PdserveError
from pdserve.rpc.v1 import worker_pb2

Returned = worker_pb2.Returned


@dataclass
class Script:
    """Faults of one worker. Indexes are output indexes; each fault happens once."""

    die_before: int | None = None
    """Dies when it is about to make this token."""
    die_after: int | None = None
    """Dies right after this token went to the stream."""
    freeze_before: int | None = None
    """Says nothing any more, sockets stay open."""
    break_stream_before: int | None = None
    """The stream breaks, the worker lives on."""
    return_before: int | None = None
    return_reason: "worker_pb2.Returned.Reason.ValueType" = Returned.REASON_PREEMPTED
    fail_before: int | None = None
    refuse_submits: int = 0
    refuse_reservations: int = 0
    die_in_submit: bool = False
    """Takes the request and dies before it answers."""
    hang_in_submit: bool = False
    """Takes the request, works on it, and never answers the call."""
    refusal: PdserveError = field(default_factory=lambda: Overloaded("full", 0.02))
    repeat_updates: bool = False
    hold_first_token_s: float = 0.0
    """Prefill's token leaves this much later than the hand-off."""
    token_delay_s: float = 0.0
    is_draining: bool = False
    is_flipping: bool = False
    """It drains to come back in the other pool."""
