"""What a decode worker remembers of hand-offs that hold no reservation any more."""

from dataclasses import dataclass, field

from kv_transfer.protocol import AttemptKey, Envelope, Refusal, RefusalReason
from pdserve.request import HandoffId, RequestId, ReservationId


@dataclass(slots=True)
class _Fence:
    key: AttemptKey
    is_aborted: bool
    """True: the attempt with this very key is over, too."""
    expires_at_s: float
    started: dict[ReservationId, AttemptKey] = field(default_factory=dict)


class Fences:
    """Tombstones, kept for a while: long enough for any late or repeated call to meet them."""

    def __init__(self, *, keep_s: float) -> None:
        """Keeps each entry for `keep_s` after it was touched last."""
        self._keep_s = keep_s
        self._by_handoff: dict[HandoffId, _Fence] = {}
        self._cancelled: dict[RequestId, tuple[int, float]] = {}
        self._gone: dict[ReservationId, tuple[RefusalReason, float]] = {}

    def __len__(self) -> int:
        """Returns the number of entries."""
        return len(self._by_handoff) + len(self._cancelled) + len(self._gone)

    def check(self, envelope: Envelope, request_id: RequestId) -> Refusal | None:
        """Refuses an attempt that is older than one seen, aborted, or cancelled."""
        cancelled = self._cancelled.get(request_id)
        if cancelled is not None and envelope.attempt <= cancelled[0]:
            return Refusal(reason=RefusalReason.CANCELLED, detail="this attempt was cancelled")
        fence = self._by_handoff.get(envelope.handoff_id)
        if fence is None or envelope.key > fence.key:
            return None
        if envelope.key < fence.key or fence.is_aborted or fence.key in fence.started.values():
            return Refusal(reason=RefusalReason.STALE, detail="this attempt is fenced")
        return None

    def raise_to(self, handoff_id: HandoffId, key: AttemptKey, now: float) -> None:
        """Refuses attempts below `key` from now on."""
        self._raise(handoff_id, key, now, is_aborted=False)

    def raise_above(self, handoff_id: HandoffId, key: AttemptKey, now: float) -> None:
        """Refuses attempts up to and including `key` from now on."""
        self._raise(handoff_id, key, now, is_aborted=True)

    def cancel(self, request_id: RequestId, attempt: int, now: float) -> None:
        """Refuses this and older attempts of a request from now on."""
        known = self._cancelled.get(request_id)
        highest = attempt if known is None else max(attempt, known[0])
        self._cancelled[request_id] = (highest, now + self._keep_s)

    def start(self, envelope: Envelope, reservation_id: ReservationId, now: float) -> None:
        """Remembers that a reservation became a running sequence."""
        self._raise(envelope.handoff_id, envelope.key, now, is_aborted=False)
        self._by_handoff[envelope.handoff_id].started[reservation_id] = envelope.key

    def has_started(self, handoff_id: HandoffId, reservation_id: ReservationId) -> bool:
        """Says whether a reservation became a running sequence and was not fenced since."""
        fence = self._by_handoff.get(handoff_id)
        return fence is not None and reservation_id in fence.started

    def take_started(
        self, handoff_id: HandoffId, up_to: AttemptKey | None = None
    ) -> list[ReservationId]:
        """Returns and forgets started reservations, those with keys up to `up_to`."""
        fence = self._by_handoff.get(handoff_id)
        if fence is None:
            return []
        taken = [ref for ref, key in fence.started.items() if up_to is None or key <= up_to]
        for reservation_id in taken:
            del fence.started[reservation_id]
        return taken

    def note_gone(self, reservation_id: ReservationId, reason: RefusalReason, now: float) -> None:
        """Remembers why a reservation was dropped."""
        self._gone[reservation_id] = (reason, now + self._keep_s)

    def why_gone(self, reservation_id: ReservationId) -> RefusalReason | None:
        """Returns why a reservation was dropped; None if it never was here."""
        entry = self._gone.get(reservation_id)
        return None if entry is None else entry[0]

    def expire(self, now: float) -> None:
        """Forgets what nobody can ask for any more."""
        for handoff_id in [h for h, fence in self._by_handoff.items() if fence.expires_at_s <= now]:
            del self._by_handoff[handoff_id]
        for request_id in [r for r, (_, end) in self._cancelled.items() if end <= now]:
            del self._cancelled[request_id]
        for reservation_id in [r for r, (_, end) in self._gone.items() if end <= now]:
            del self._gone[reservation_id]

    def _raise(
        self, handoff_id: HandoffId, key: AttemptKey, now: float, *, is_aborted: bool
    ) -> None:
        expires_at_s = now + self._keep_s
        fence = self._by_handoff.get(handoff_id)
        if fence is None:
            self._by_handoff[handoff_id] = _Fence(key, is_aborted, expires_at_s)
            return
        fence.expires_at_s = expires_at_s
        if key > fence.key:
            fence.key, fence.is_aborted = key, is_aborted
        elif key == fence.key:
            fence.is_aborted = fence.is_aborted or is_aborted
