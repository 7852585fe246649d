"""Lets the hand-off protocol reserve and release blocks of the decode scheduler."""

from decode_worker import admission
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.protocol import Refusal, RefusalReason, ReservedBlocks
from pdserve.errors import StaleAttempt
from pdserve.request import Request, RequestId, ReservationId

_REASONS = {
    admission.RefusalReason.NO_ROOM: RefusalReason.NO_ROOM,
    admission.RefusalReason.TOO_LARGE: RefusalReason.TOO_LARGE,
}


class SchedulerReserver:
    """A `BlockReserver` over the scheduler, which knows requests and attempts, not reservations."""

    def __init__(self, scheduler: DecodeScheduler, max_model_len: int, num_rejects: int) -> None:
        """`num_rejects`: refuses the first n reservations, on purpose (a drill)."""
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._num_rejects = num_rejects
        self._keys: dict[ReservationId, tuple[RequestId, int]] = {}

    def reserve(self, reservation_id: ReservationId, request: Request) -> ReservedBlocks | Refusal:
        """Takes all blocks the prompt and its first growth need, or none."""
        if self._num_rejects > 0:
            self._num_rejects -= 1
            return Refusal(reason=RefusalReason.NO_ROOM, detail="drill", retry_after_s=0.05)
        if len(request.token_ids) >= self._max_model_len:
            detail = f"{len(request.token_ids)} tokens, the limit here is {self._max_model_len}"
            return Refusal(reason=RefusalReason.TOO_LARGE, detail=detail)
        try:
            answer = self._scheduler.reserve(request)
        except StaleAttempt as error:
            return Refusal(reason=RefusalReason.STALE, detail=str(error))
        if isinstance(answer, admission.Refusal):
            return Refusal(
                reason=_REASONS[answer.reason],
                detail=answer.detail,
                retry_after_s=answer.retry_after_s or 0.0,
            )
        self._keys[reservation_id] = (request.request_id, request.attempt)
        return ReservedBlocks(num_cached_tokens=answer.num_cached_tokens)

    def release(self, reservation_id: ReservationId) -> None:
        """Gives back the blocks of a reservation that did not start."""
        request_id, attempt = self._keys.pop(reservation_id)
        self._scheduler.release_reservation(request_id, attempt)

    def start(self, reservation_id: ReservationId, first_token: int) -> None:
        """Lets a landed reservation run; the key stays, so that it can be stopped.

        Raises:
            StaleAttempt: the scheduler let go of it, or a newer attempt is here.
        """
        request_id, attempt = self._keys[reservation_id]
        self._scheduler.start(request_id, attempt, first_token)

    def stop(self, reservation_id: ReservationId) -> None:
        """Ends a sequence that was started from a reservation, if it still runs, silently."""
        key = self._keys.pop(reservation_id, None)
        if key is not None:
            self._scheduler.cancel(*key)

    def key(self, reservation_id: ReservationId) -> tuple[RequestId, int]:
        """Returns the request and attempt that a reservation is for."""
        return self._keys[reservation_id]

    def find(self, request_id: RequestId, attempt: int) -> ReservationId | None:
        """Returns the reservation of an attempt."""
        wanted = (request_id, attempt)
        return next((key for key, value in self._keys.items() if value == wanted), None)

    def forget(self, request_id: RequestId, attempt: int) -> None:
        """Drops the key of a sequence that ended."""
        reservation_id = self.find(request_id, attempt)
        if reservation_id is not None:
            del self._keys[reservation_id]
