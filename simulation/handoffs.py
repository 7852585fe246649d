"""The hand-off in virtual time: a reduced form of `kv_transfer.protocol`, on its own rungs.

    unplaced -> reserving -> sending -> committed -> handed off
        ^___________|___________|___________|
          refused, or the decode worker died: the computed KV waits on prefill

What is left out: frames (a chunk is sent as a whole), leases, checks of envelopes. What is kept: a
reservation is asked for ahead of the computing and holds blocks, chunks are sent while the next is
computed, the commit waits for the last byte, prefill's blocks are held until the answer.

A worker moves its transfers in the order in which they became ready, those of all its links at one
worker's rate. A transfer that waits for one of its ends does not hold up the other end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_worker.admission import Grant, RefusalReason
from kv_transfer.prefill_actions import TERMINAL_STAGES, PrefillStage
from pdserve.predictor.profile import Profile
from pdserve.request import Request, RequestId
from prefill_worker.scheduler import PrefillProgress
from simulation.clock import EventQueue
from simulation.decode_node import DecodeNode
from simulation.prefill_node import PrefillNode


@dataclass(slots=True, eq=False)
class Handoff:
    """One attempt of a request, from its submission to a prefill worker."""

    request: Request
    prefill: PrefillNode
    decode: DecodeNode | None
    stage: PrefillStage = PrefillStage.UNPLACED
    is_asked: bool = False
    num_computed: int = 0
    num_sent: int = 0
    has_token: bool = False
    sent_s: float = 0.0
    decode_attempt: int = 0
    unplaced_s: float = 0.0


class HandoffOutlet(Protocol):
    """The router, as hand-offs see it."""

    def needs_decode(self, handoff: Handoff, retry_after_s: float | None) -> None:
        """The decode worker refused or died; None: at once, else when another try makes sense."""
        ...

    def cannot_fit(self, handoff: Handoff) -> None:
        """No decode worker like this one can ever hold it."""
        ...

    def is_handed_off(self, handoff: Handoff) -> None:
        """Decode owns the sequence."""
        ...


class Handoffs:
    """All hand-offs of a cluster."""

    def __init__(
        self, profile: Profile, control_s: float, queue: EventQueue, outlet: HandoffOutlet
    ) -> None:
        """Takes the law of transfers, and how long a control message takes."""
        self._profile = profile
        self._control_s = control_s
        self._queue = queue
        self._outlet = outlet
        self._open: dict[RequestId, Handoff] = {}

    def begin(self, request: Request, prefill: PrefillNode, decode: DecodeNode | None) -> Handoff:
        """Notes a request that a prefill worker is about to get; None: decode died already."""
        handoff = Handoff(request=request, prefill=prefill, decode=decode)
        self._open[request.request_id] = handoff
        return handoff

    def find(self, request_id: RequestId) -> Handoff | None:
        """Returns the hand-off of a request, until it has ended."""
        return self._open.get(request_id)

    def wants_reservations(self, requests: Sequence[Request]) -> None:
        """Asks the decode workers that were chosen."""
        for request in requests:
            handoff = self._open[request.request_id]
            handoff.is_asked = True
            if handoff.decode is not None and handoff.stage is PrefillStage.UNPLACED:
                self._reserve(handoff)

    def place(self, handoff: Handoff, decode: DecodeNode) -> None:
        """Names another decode worker."""
        handoff.decode = decode
        if handoff.is_asked and handoff.stage is PrefillStage.UNPLACED:
            self._reserve(handoff)

    def has_computed(self, progress: PrefillProgress) -> None:
        """Sends what became ready; after the last chunk, commits."""
        handoff = self._open[progress.request_id]
        handoff.num_computed = progress.num_computed
        handoff.has_token = bool(progress.samples)
        self._send(handoff)

    def end(self, handoff: Handoff, stage: PrefillStage) -> None:
        """Ends a hand-off that is not to be completed, and frees what decode holds for it."""
        if handoff.stage in TERMINAL_STAGES:
            return
        self._leave_decode(handoff)
        handoff.stage = stage
        del self._open[handoff.request.request_id]

    def lose_decode(self, handoff: Handoff) -> None:
        """The decode worker died, or gave the reservation up."""
        handoff.decode_attempt += 1
        self._unplace(handoff, None)

    def _leave_decode(self, handoff: Handoff) -> None:
        held = handoff.stage in (PrefillStage.SENDING, PrefillStage.COMMITTED)
        if held and handoff.decode is not None and not handoff.decode.is_dead:
            request = handoff.request
            handoff.decode.release_reservation(request.request_id, request.attempt)

    def _reserve(self, handoff: Handoff) -> None:
        handoff.stage = PrefillStage.RESERVING
        handoff.decode_attempt += 1
        attempt = handoff.decode_attempt
        self._queue.after(self._control_s, lambda: self._ask(handoff, attempt))

    def _ask(self, handoff: Handoff, attempt: int) -> None:
        decode = handoff.decode
        is_current = handoff.decode_attempt == attempt
        if not is_current or handoff.stage is not PrefillStage.RESERVING or decode is None:
            return
        if decode.is_dead:
            return  # the router notices, and places it anew
        if decode.is_draining:
            self._queue.after(self._control_s, lambda: self._refused(handoff, attempt, None))
            return
        answer = decode.reserve(handoff.request)
        if isinstance(answer, Grant):
            # The blocks are taken now; prefill hears of them a message later.
            handoff.stage = PrefillStage.SENDING
            handoff.num_sent = answer.num_cached_tokens
            handoff.sent_s = self._queue.now() + self._control_s
            self._queue.at(handoff.sent_s, lambda: self._send(handoff))
        elif answer.reason is RefusalReason.TOO_LARGE:
            self._outlet.cannot_fit(handoff)
        else:
            retry_after_s = answer.retry_after_s
            self._queue.after(
                self._control_s, lambda: self._refused(handoff, attempt, retry_after_s)
            )

    def _refused(self, handoff: Handoff, attempt: int, retry_after_s: float | None) -> None:
        if handoff.decode_attempt == attempt and handoff.stage is PrefillStage.RESERVING:
            self._unplace(handoff, retry_after_s)

    def _unplace(self, handoff: Handoff, retry_after_s: float | None) -> None:
        handoff.stage = PrefillStage.UNPLACED
        handoff.num_sent = 0
        handoff.unplaced_s = self._queue.now()
        self._outlet.needs_decode(handoff, retry_after_s)

    def _send(self, handoff: Handoff) -> None:
        """Puts on the link what is computed and not sent, and after the last of it the commit."""
        decode = handoff.decode
        now_s = self._queue.now()
        if handoff.stage is not PrefillStage.SENDING or decode is None:
            return
        num_new = handoff.num_computed - handoff.num_sent
        if num_new > 0:
            took_s = self._profile.transfer_s(num_new * self._profile.kv_bytes_per_token)
            # Each pair of workers has a link of its own, so that nobody waits for a peer of
            # another pair: what two links share is only what either worker can move.
            ends = handoff.prefill, decode
            for end in ends:
                end.link_free_s = max(now_s, end.link_free_s) + took_s
            handoff.sent_s = max(handoff.sent_s + took_s, *(end.link_free_s for end in ends))
            handoff.num_sent = handoff.num_computed
        if handoff.has_token:
            handoff.stage = PrefillStage.COMMITTED
            attempt = handoff.decode_attempt
            landed_s = max(handoff.sent_s, now_s + self._control_s)
            self._queue.at(landed_s, lambda: self._land(handoff, attempt))

    def _land(self, handoff: Handoff, attempt: int) -> None:
        decode = handoff.decode
        is_current = handoff.decode_attempt == attempt
        if not is_current or handoff.stage is not PrefillStage.COMMITTED or decode is None:
            return
        if decode.is_dead:
            return
        handoff.stage = PrefillStage.HANDED_OFF
        del self._open[handoff.request.request_id]
        decode.land(handoff.request)
        self._outlet.is_handed_off(handoff)
        self._queue.after(self._control_s, lambda: self._acknowledged(handoff))

    def _acknowledged(self, handoff: Handoff) -> None:
        if not handoff.prefill.is_dead:
            request = handoff.request
            handoff.prefill.release(request.request_id, request.attempt)
