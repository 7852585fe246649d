"""The prefill worker's side of one hand-off (the ladder is drawn in `protocol.py`)."""

from kv_transfer.computing import ComputedKv
from kv_transfer.grants import derive_manifest
from kv_transfer.prefill_actions import (
    TERMINAL_STAGES,
    DropFrames,
    LinkUse,
    PrefillAction,
    PrefillStage,
    ReleaseBlocks,
    ReportHandedOff,
    ReportNeedsPlacement,
    ReportRefused,
    ReportReturned,
    ReturnReason,
    SendAbort,
    SendCommit,
    SendRenew,
    SendReserve,
)
from kv_transfer.protocol import (
    Acknowledged,
    CallFailed,
    DecodeTarget,
    Envelope,
    FirstToken,
    Grant,
    HandoffAborted,
    Identity,
    Refusal,
    RefusalReason,
    make_envelope,
)
from kv_transfer.shipment import Shipment
from pdserve.config.model import KvGeometry
from pdserve.config.worker import HandoffConfig
from pdserve.request import Request, ReservationId
from pdserve.timeline import Clock

RENEWALS_PER_LEASE = 3
LANDING_FRAME_TIMEOUTS = 2
"""Without any progress for this many frame time-outs, a hand-off is given up."""


class PrefillHandoff:
    """Moves one request's KV to a decode worker, to another if the first fails.

    Every method takes one event and returns the actions it causes, in order. Called on the engine
    thread only. Answers carry the decode attempt of the call they answer; stale ones change
    nothing. Keep the object until `is_settled`: a late grant must still be given back.
    """

    def __init__(
        self,
        *,
        request: Request,
        me: Identity,
        geometry: KvGeometry,
        config: HandoffConfig,
        clock: Clock,
    ) -> None:
        """Starts unplaced, with nothing computed."""
        self.request = request
        self.stage = PrefillStage.UNPLACED
        self._me = me
        self._geometry = geometry
        self._config = config
        self._clock = clock
        self._target: DecodeTarget | None = None
        self._shipment: Shipment | None = None
        """What the target granted; gone with it."""
        self._computed = ComputedKv()
        self._tokens: tuple[FirstToken, ...] = ()
        self._token_at_s = 0.0
        self._last_decode_attempt = 0
        self._unplaced_at_s: float | None = None
        self._progress_at_s = clock.now()
        self._renewed_at_s = 0.0
        self._num_open_calls = 0

    @property
    def is_done(self) -> bool:
        """True once `ReleaseBlocks` has been emitted."""
        return self.stage in TERMINAL_STAGES

    @property
    def is_settled(self) -> bool:
        """True when it is done and no Reserve or Commit call is unanswered."""
        return self.is_done and self._num_open_calls == 0

    @property
    def reservation_id(self) -> ReservationId | None:
        """The reservation it holds on decode."""
        return None if self._shipment is None else self._shipment.reservation_id

    @property
    def links(self) -> tuple[LinkUse, ...]:
        """The links that its frames take; none before the grant."""
        return () if self._shipment is None else self._shipment.links

    def place(self, target: DecodeTarget) -> list[PrefillAction]:
        """Asks a decode worker for a reservation; ignored unless it is a newer attempt.

        A placement that is under way is left: the router has lost that decode worker, and knows it
        before a call to a frozen one times out.
        """
        if self.is_done or target.decode_attempt <= self._last_decode_attempt:
            return []
        actions = self._leave_decode("placed on another worker", must_abort=True)
        self._target = target
        self._last_decode_attempt = target.decode_attempt
        self._unplaced_at_s = None
        self._enter(PrefillStage.RESERVING)
        self._num_open_calls += 1
        actions.append(
            SendReserve(
                target=target,
                envelope=self._envelope(target, None),
                timeout_s=self._config.call_timeout_s,
            )
        )
        return actions

    def reserve_answered(
        self, target: DecodeTarget, outcome: Grant | Refusal | CallFailed
    ) -> list[PrefillAction]:
        """Takes the answer to `SendReserve`; gives a grant back that came too late."""
        self._num_open_calls -= 1
        if self.stage is not PrefillStage.RESERVING or target != self._target:
            if isinstance(outcome, Grant):
                return [self._abort(target, outcome.reservation_id, "granted too late")]
            return []
        if isinstance(outcome, CallFailed):
            return self._unplace(f"reserve failed: {outcome.detail}", None)
        if isinstance(outcome, Refusal):
            if outcome.reason is RefusalReason.CANCELLED:
                return self._return(ReturnReason.TRANSFER_FAILED, outcome.detail)
            if outcome.is_final:
                return self._refuse(outcome)
            detail = f"refused ({outcome.reason.value}): {outcome.detail}"
            return self._unplace(detail, outcome.retry_after_s, must_abort=False)
        manifest = derive_manifest(self._geometry, outcome, len(self.request.token_ids))
        if manifest is None:
            detail = "the manifests differ"
            given_back = self._abort(target, outcome.reservation_id, detail)
            return [given_back, *self._unplace(detail, None, must_abort=False)]
        self._shipment = Shipment(target=target, grant=outcome, manifest=manifest)
        self._renewed_at_s = self._clock.now()
        self._enter(PrefillStage.SENDING)
        return [*self._push_ready(), *self._commit_if_ready()]

    def launched(self, num_tokens: int, step: int) -> list[PrefillAction]:
        """Notes a step in flight that completes KV of so many tokens; pushes what it completes.

        Only where links can wait for it on the device.
        """
        if self.is_done:
            return []
        self._computed.launch(num_tokens, step)
        return self._push_ready()

    def computed(self, num_tokens: int) -> list[PrefillAction]:
        """Notes that KV of the first `num_tokens` tokens is valid; pushes what became ready."""
        if self.is_done:
            return []
        self._computed.end(num_tokens)
        return self._push_ready()

    @property
    def live_samples(self) -> tuple[Request, ...]:
        """The samples of the request that did not end here, each as a request of its own."""
        if not self._tokens:
            return self.request.samples()
        return tuple(self.request.sample(token.sample_index) for token in self._tokens)

    def sampled(self, *tokens: FirstToken, is_finished: bool) -> list[PrefillAction]:
        """Takes the next token of each sample that goes on; `is_finished`: none does."""
        if self.is_done:
            return []
        self._computed.end(len(self.request.token_ids))
        self._tokens = tokens
        self._token_at_s = self._clock.now()
        if self._shipment is not None and self._shipment.pushed_whole_at_s is not None:
            # Ahead of their step: what was sent before it ended took nobody's time.
            self._shipment.pushed_whole_at_s = self._token_at_s
        if is_finished:
            return self._finish(PrefillStage.FINISHED, "finished at prefill")
        return [*self._push_ready(), *self._commit_if_ready()]

    def frame_sent(self, reservation_id: ReservationId, frame_index: int) -> list[PrefillAction]:
        """Notes progress of the link."""
        if self._shipment is not None and self._holds(reservation_id):
            self._shipment.note_sent(frame_index)
            self._progress_at_s = self._clock.now()
        return []

    def frames_lost(self, reservation_id: ReservationId, detail: str) -> list[PrefillAction]:
        """Takes a link's death with frames of this reservation unsent."""
        if not self._holds(reservation_id):
            return []
        return self._unplace(f"link down: {detail}", None)

    def commit_answered(
        self, target: DecodeTarget, outcome: Acknowledged | HandoffAborted | CallFailed
    ) -> list[PrefillAction]:
        """Takes the answer to `SendCommit`; a lost answer is asked for again."""
        self._num_open_calls -= 1
        if self.stage is not PrefillStage.COMMITTED or target != self._target:
            return []
        if isinstance(outcome, Acknowledged):
            return self._hand_off()
        if isinstance(outcome, HandoffAborted):
            if outcome.reason is RefusalReason.CANCELLED:
                return self._return(ReturnReason.TRANSFER_FAILED, outcome.detail)
            return self._unplace(f"aborted by decode: {outcome.detail}", None, must_abort=False)
        if outcome.is_unreachable or self._is_stalled():
            return self._unplace(f"commit failed: {outcome.detail}", None)
        # Decode may have started already and its answer been lost: it answers a repeated commit.
        return [self._make_commit()]

    def renewed(self, target: DecodeTarget, *, is_alive: bool) -> list[PrefillAction]:
        """Takes the answer to `SendRenew`; a call that failed is not reported here."""
        if target != self._target or self.stage is not PrefillStage.SENDING or is_alive:
            # Once committed, the answer to the commit is what counts: a reservation that has
            # started is gone, too.
            return []
        return self._unplace("the reservation is gone", None, must_abort=False)

    def cancel(self) -> list[PrefillAction]:
        """Drops everything, at any stage."""
        if self.is_done:
            return []
        return self._finish(PrefillStage.CANCELLED, "cancelled")

    def tick(self) -> list[PrefillAction]:
        """Acts on the time: renewals, and the deadline of the present stage."""
        now = self._clock.now()
        if self.stage is PrefillStage.RESERVING:
            # The call has its own time-out; this is the belt beside it (a lost answer).
            if now - self._progress_at_s > 2 * self._config.call_timeout_s:
                return self._unplace("no answer to reserve", None)
            return []
        if self.stage is PrefillStage.UNPLACED:
            return self._expire_hold(now)
        if self.stage not in (PrefillStage.SENDING, PrefillStage.COMMITTED):
            return []
        if self._has_unsent_frames() or self.stage is PrefillStage.COMMITTED:
            if self._is_stalled():
                return self._unplace("no progress", None)
        else:
            self._progress_at_s = now
        return self._renew(now)

    # Everything below is one step of the above.

    def _push_ready(self) -> list[PrefillAction]:
        if self._shipment is None:
            return []
        now_s = self._clock.now()
        was_idle = not self._shipment.has_unsent_frames
        frames = self._shipment.push(self._computed, now_s)
        if frames and was_idle:
            self._progress_at_s = now_s
        return [*frames]

    def _commit_if_ready(self) -> list[PrefillAction]:
        if self.stage is not PrefillStage.SENDING or not self._tokens:
            return []
        self._enter(PrefillStage.COMMITTED)
        return [self._make_commit()]

    def _make_commit(self) -> SendCommit:
        assert self._shipment is not None
        assert self._tokens
        self._num_open_calls += 1
        return SendCommit(
            target=self._shipment.target,
            envelope=self._envelope(self._shipment.target, self._shipment.reservation_id),
            first_tokens=self._tokens,
            manifest_digest=self._shipment.grant.manifest_digest,
            timeout_s=self._landing_timeout_s,
        )

    def _hand_off(self) -> list[PrefillAction]:
        assert self._shipment is not None
        self._enter(PrefillStage.HANDED_OFF)
        now_s, whole_s = self._clock.now(), self._shipment.pushed_whole_at_s
        return [
            ReportHandedOff(
                decode_attempt=self._last_decode_attempt,
                handoff_s=now_s - self._token_at_s,
                num_blocks=self._shipment.manifest.num_blocks,
                num_bytes=self._shipment.manifest.num_bytes,
                transfer_s=None if whole_s is None else now_s - whole_s,
            ),
            ReleaseBlocks(),
        ]

    def _unplace(
        self, detail: str, retry_after_s: float | None, *, must_abort: bool = True
    ) -> list[PrefillAction]:
        actions = self._leave_decode(detail, must_abort=must_abort)
        self._enter(PrefillStage.UNPLACED)
        self._unplaced_at_s = self._clock.now()
        return [
            *actions,
            ReportNeedsPlacement(
                detail=detail,
                decode_attempt=self._last_decode_attempt,
                hold_s=self._config.hold_s,
                retry_after_s=retry_after_s,
            ),
        ]

    def _return(self, reason: ReturnReason, detail: str) -> list[PrefillAction]:
        actions = self._leave_decode(detail, must_abort=False)
        self._enter(PrefillStage.RETURNED)
        return [*actions, ReportReturned(reason=reason, detail=detail), ReleaseBlocks()]

    def _refuse(self, refusal: Refusal) -> list[PrefillAction]:
        self._leave_decode(refusal.detail, must_abort=False)
        self._enter(PrefillStage.REFUSED)
        report = ReportRefused(reason=refusal.reason, detail=refusal.detail)
        return [report, ReleaseBlocks()]

    def _finish(self, stage: PrefillStage, detail: str) -> list[PrefillAction]:
        actions = self._leave_decode(detail, must_abort=True)
        self._enter(stage)
        return [*actions, ReleaseBlocks()]

    def _leave_decode(self, detail: str, *, must_abort: bool) -> list[PrefillAction]:
        """Drops what is under way to the present target. Frames are copies: blocks are free."""
        actions: list[PrefillAction] = []
        if self._shipment is not None:
            actions.append(DropFrames(reservation_id=self._shipment.reservation_id))
        if must_abort and self._target is not None:
            actions.append(self._abort(self._target, self.reservation_id, detail))
        self._target = None
        self._shipment = None
        return actions

    def _renew(self, now: float) -> list[PrefillAction]:
        assert self._shipment is not None
        if now - self._renewed_at_s < self._shipment.grant.lease_s / RENEWALS_PER_LEASE:
            return []
        self._renewed_at_s = now
        return [
            SendRenew(
                target=self._shipment.target,
                envelope=self._envelope(self._shipment.target, self._shipment.reservation_id),
                timeout_s=self._config.call_timeout_s,
            )
        ]

    def _expire_hold(self, now: float) -> list[PrefillAction]:
        if not self._tokens:
            return []
        held_since_s = max(self._unplaced_at_s or self._token_at_s, self._token_at_s)
        if now - held_since_s <= self._config.hold_s:
            return []
        return self._return(ReturnReason.PLACEMENT_TIMEOUT, "no decode worker was found in time")

    @property
    def _landing_timeout_s(self) -> float:
        return LANDING_FRAME_TIMEOUTS * self._config.frame_timeout_s

    def _is_stalled(self) -> bool:
        return self._clock.now() - self._progress_at_s > self._landing_timeout_s

    def _has_unsent_frames(self) -> bool:
        return self._shipment is not None and self._shipment.has_unsent_frames

    def _holds(self, reservation_id: ReservationId) -> bool:
        return self._shipment is not None and self._shipment.reservation_id == reservation_id

    def _enter(self, stage: PrefillStage) -> None:
        assert not self.is_done, f"{stage} after {self.stage}"
        self.stage = stage
        self._progress_at_s = self._clock.now()

    def _abort(
        self, target: DecodeTarget, reservation_id: ReservationId | None, detail: str
    ) -> SendAbort:
        return SendAbort(
            target=target, envelope=self._envelope(target, reservation_id), detail=detail
        )

    def _envelope(self, target: DecodeTarget, reservation_id: ReservationId | None) -> Envelope:
        return make_envelope(self._me, self.request, target, reservation_id)
