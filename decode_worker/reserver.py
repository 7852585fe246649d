"""Lets the hand-off protocol reserve and release blocks of the decode scheduler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from decode_worker import admission
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.protocol import Refusal, RefusalReason, ReservedBlocks
from pdserve.errors import StaleAttempt
from pdserve.request import Request, RequestId, ReservationId

_REASONS = {
    admission.RefusalReason.NO_ROOM: RefusalReason.NO_ROOM,
    admission.RefusalReason.TOO_LARGE: RefusalReason.TOO_LARGE,
}


@dataclass(slots=True)
class _Key:
    """What a reservation is for."""

    request_id: RequestId
    attempt: int
    running: set[RequestId] = field(default_factory=set)
    """Samples that were started and have not ended."""


class SchedulerReserver:
    """A `BlockReserver` over the scheduler, which knows requests and attempts, not reservations."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        max_model_len: int,
        num_rejects: int,
        withdraw: Callable[[ReservationId], None],
    ) -> None:
        """Starts without reservations.

        Args:
            scheduler: has the blocks.
            max_model_len: one more token than a prompt may have.
            num_rejects: refuses the first n reservations, on purpose (a drill).
            withdraw: called before blocks are given back; then no link writes them any more.
        """
        self._scheduler = scheduler
        self._withdraw = withdraw
        self._max_model_len = max_model_len
        self._num_rejects = num_rejects
        self._keys: dict[ReservationId, _Key] = {}

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
        self._keys[reservation_id] = _Key(request.request_id, request.attempt)
        return ReservedBlocks(num_cached_tokens=answer.num_cached_tokens)

    def release(self, reservation_id: ReservationId) -> None:
        """Gives back the blocks of a reservation that did not start."""
        self._withdraw(reservation_id)
        key = self._keys.pop(reservation_id)
        self._scheduler.release_reservation(key.request_id, key.attempt)

    def start(
        self, reservation_id: ReservationId, first_tokens: Mapping[int, int]
    ) -> tuple[Request, ...]:
        """Lets a landed reservation run; the key stays while a sample runs, so it can be stopped.

        Returns:
            The samples that run.

        Raises:
            StaleAttempt: the scheduler let go of it, or a newer attempt is here.
        """
        key = self._keys[reservation_id]
        samples = self._scheduler.start(key.request_id, key.attempt, first_tokens)
        key.running = {sample.request_id for sample in samples}
        if not samples:
            del self._keys[reservation_id]
        return samples

    def stop(self, reservation_id: ReservationId) -> None:
        """Ends the samples that were started from a reservation and still run, silently."""
        key = self._keys.pop(reservation_id, None)
        if key is not None:
            for request_id in key.running:
                self._scheduler.cancel(request_id, key.attempt)

    def key(self, reservation_id: ReservationId) -> tuple[RequestId, int]:
        """Returns the request and attempt that a reservation is for."""
        key = self._keys[reservation_id]
        return key.request_id, key.attempt

    def find(self, request_id: RequestId, attempt: int) -> ReservationId | None:
        """Returns the reservation of an attempt."""
        for reservation_id, key in self._keys.items():
            if key.request_id == request_id and key.attempt == attempt:
                return reservation_id
        return None

    def forget(self, request_id: RequestId, attempt: int) -> None:
        """Drops a sample that ended, and with the last one the key."""
        for reservation_id, key in self._keys.items():
            if key.attempt == attempt and request_id in key.running:
                key.running.remove(request_id)
                if not key.running:
                    del self._keys[reservation_id]
                return
