"""The decode worker's side of all its hand-offs (the ladder is drawn in `protocol.py`)."""

from collections.abc import Callable

from kv_transfer.decode_actions import (
    AnswerCommit,
    AnswerReserve,
    CancelOutcome,
    DecodeAction,
    Expect,
    RejectFrame,
    Scatter,
    Start,
)
from kv_transfer.decode_counters import DecodeCounters
from kv_transfer.events import FrameLanded, FramePlaced, LinkEnds, LinkId, TokensTold
from kv_transfer.fences import Fences
from kv_transfer.lanes import KvPair
from kv_transfer.protocol import (
    Acknowledged,
    BlockReserver,
    Envelope,
    FirstToken,
    HandoffAborted,
    Identity,
    LinkEndpoint,
    Refusal,
    RefusalReason,
)
from kv_transfer.reservation import Reservation
from kv_transfer.reservation_book import ReservationBook
from kv_transfer.terms import Terms
from pdserve.config.link_memory import FrameSizes
from pdserve.config.model import KvGeometry
from pdserve.config.worker import HandoffConfig
from pdserve.request import Incarnation, Request, RequestId, ReservationId, WorkerId
from pdserve.timeline import Clock

RETRY_AFTER_QUARANTINE_S = 0.05


class DecodeHandoffs:
    """All reservations of a decode worker.

    Every method takes one event and returns the actions it causes, in order. Called on the engine
    thread only. Blocks leave a reservation in exactly one way: `BlockReserver.release`, or `Start`.
    """

    def __init__(  # noqa: PLR0913 - where the parts meet
        self,
        *,
        me: Identity,
        geometry: KvGeometry,
        config: HandoffConfig,
        reserver: BlockReserver,
        link_endpoints: tuple[LinkEndpoint, ...],
        mint_id: Callable[[], ReservationId],
        clock: Clock,
        frame_sizes: FrameSizes | None = None,
    ) -> None:
        """Starts empty.

        Args:
            me: this worker.
            geometry: the shape of its blocks.
            config: leases.
            reserver: the scheduler.
            link_endpoints: where this worker's ranks listen for links, in their order.
            mint_id: returns 128 fresh random bits.
            clock: gives monotonic seconds.
            frame_sizes: how prompts are cut; None: as on a CPU.
        """
        self.counters = DecodeCounters()
        self.is_draining = False
        """True refuses new reservations."""
        self._me = me
        self._config = config
        self._terms = Terms(me, geometry, config, link_endpoints, frame_sizes)
        self._reserver = reserver
        self._mint_id = mint_id
        self._clock = clock
        self._reservations = ReservationBook()
        self._peers: dict[WorkerId, Incarnation] = {}
        self._epochs: dict[LinkEnds, int] = {}
        """Of the latest link over which frames of each pair of ranks came."""
        self._fences = Fences(keep_s=6 * max(config.lease_s, config.frame_timeout_s))

    @property
    def num_reservations(self) -> int:
        """Reservations that hold blocks, those being aborted included."""
        return len(self._reservations)

    @property
    def num_receiving(self) -> int:
        """Reservations of which some frames have come."""
        return self._reservations.num_receiving

    def reserve(self, call_id: int, envelope: Envelope, request: Request) -> list[DecodeAction]:
        """Answers a Reserve call; a newer attempt drops what older ones of its hand-off hold."""
        pair = self._check(envelope, request)
        if isinstance(pair, Refusal):
            return [self._refuse(call_id, pair)]
        actions = self._meet_peer(envelope)
        live = self._reservations.find(envelope.handoff_id)
        if live is not None and live.envelope.key == envelope.key and not live.is_aborting:
            return [*actions, AnswerReserve(call_id=call_id, answer=live.grant)]
        fenced = self._fences.check(envelope, request.request_id)
        if fenced is not None:
            return [*actions, self._refuse(call_id, fenced)]
        if live is not None:
            actions += self._abort(live, RefusalReason.STALE, "a newer attempt came")
        self._fences.raise_to(envelope.handoff_id, envelope.key, self._clock.now())
        for old in self._fences.take_started(envelope.handoff_id):
            self._reserver.stop(old)
        return [*actions, *self._grant(call_id, envelope, request, pair)]

    def frame_landed(self, landed: FrameLanded) -> list[DecodeAction]:
        """Checks a frame; it is scattered, or rejected and its hand-off aborted."""
        entry = self._reservations.get(landed.reservation_id)
        if entry is None or entry.is_aborting:
            return [self._reject(landed, "unknown reservation")]
        if entry.envelope.prefill_incarnation != landed.link.peer:
            return [self._reject(landed, "another worker's reservation")]
        fault = entry.find_fault(landed)
        if fault is not None:
            detail = f"frame {landed.frame_index}: {fault}"
            return [
                self._reject(landed, detail),
                *self._abort(entry, RefusalReason.INCOMPATIBLE, detail),
            ]
        self._note_landed(entry, landed)
        entry.scattering.add(landed.frame_index)
        frame = entry.manifest.frames[landed.frame_index]
        return [Scatter(reservation_id=landed.reservation_id, frame=frame, landed=landed)]

    def frame_placed(self, placed: FramePlaced) -> list[DecodeAction]:
        """Checks a frame that its link has written to its blocks already."""
        entry = self._reservations.get(placed.reservation_id)
        if entry is None or entry.is_aborting:
            self.counters.frames_rejected += 1
            return []
        fault = entry.find_fault(placed)
        if fault is not None:
            self.counters.frames_rejected += 1
            detail = f"frame {placed.frame_index}: {fault}"
            return self._abort(entry, RefusalReason.INCOMPATIBLE, detail)
        self._note_landed(entry, placed)
        return self._start_if_landed(entry)

    def frame_scattered(
        self, reservation_id: ReservationId, frame_index: int
    ) -> list[DecodeAction]:
        """Notes that a `Scatter` is through; its blocks are not written any more."""
        entry = self._reservations.get(reservation_id)
        assert entry is not None, "a reservation stays while a scatter is pending"
        entry.scattering.discard(frame_index)
        if entry.is_aborting:
            self._release_if_quiet(entry)
            return []
        return self._start_if_landed(entry)

    def commit(
        self,
        call_id: int,
        envelope: Envelope,
        first_tokens: tuple[FirstToken, ...],
        manifest_digest: bytes,
    ) -> list[DecodeAction]:
        """Takes a Commit call, new or repeated; it is answered when all frames are there."""
        reservation_id = envelope.reservation_id
        if envelope.decode_incarnation != self._me.incarnation or reservation_id is None:
            return [self._deny(call_id, "another incarnation or no reservation")]
        if self._fences.has_started(envelope.handoff_id, reservation_id):
            return [AnswerCommit(call_id=call_id, answer=Acknowledged())]
        entry = self._reservations.get(reservation_id)
        if entry is None or entry.is_aborting:
            reason = self._fences.why_gone(reservation_id) or RefusalReason.STALE
            return [self._deny(call_id, "unknown reservation", reason)]
        if entry.envelope.key != envelope.key or not entry.is_from(envelope):
            return [self._deny(call_id, "the envelope differs from the reservation's")]
        entry.waiting_calls.append(call_id)
        if manifest_digest != entry.manifest.digest:
            return self._abort(entry, RefusalReason.INCOMPATIBLE, "the manifests differ")
        if entry.first_tokens and entry.first_tokens != first_tokens:
            return self._abort(entry, RefusalReason.INCOMPATIBLE, "two different first tokens")
        entry.first_tokens = first_tokens
        entry.expires_at_s = self._clock.now() + self._config.lease_s
        return self._start_if_landed(entry)

    def tokens_told(self, told: TokensTold) -> list[DecodeAction]:
        """Takes first tokens ahead of their commit, which says the same and is answered then.

        What does not fit is left to the commit to refuse.
        """
        entry = self._reservations.get(told.words.reservation_id)
        if entry is None or not entry.takes_at_its_word(told):
            return []
        entry.first_tokens = told.words.first_tokens
        return self._start_if_landed(entry)

    def abort(self, envelope: Envelope, detail: str) -> list[DecodeAction]:
        """Takes an Abort call: fences this attempt, known or not, running or not."""
        if envelope.decode_incarnation != self._me.incarnation:
            self.counters.stale_refused += 1
            return []
        live = self._reservations.find(envelope.handoff_id)
        actions: list[DecodeAction] = []
        if live is not None and live.envelope.key <= envelope.key:
            actions = self._abort(live, RefusalReason.STALE, detail)
        self._fences.raise_above(envelope.handoff_id, envelope.key, self._clock.now())
        # Prefill aborts only what it has no acknowledgement for, and will place elsewhere.
        for old in self._fences.take_started(envelope.handoff_id, up_to=envelope.key):
            self._reserver.stop(old)
        return actions

    def cancel(self, request_id: RequestId, attempt: int) -> CancelOutcome:
        """Drops reservations of this and older attempts; an unknown id leaves a tombstone.

        A sequence that has started is the scheduler's to cancel.
        """
        self._fences.cancel(request_id, attempt, self._clock.now())
        actions: list[DecodeAction] = []
        was_known = False
        for entry in self._reservations.all():
            if entry.request.request_id == request_id and entry.envelope.attempt <= attempt:
                was_known = True
                actions += self._abort(entry, RefusalReason.CANCELLED, "cancelled")
        return CancelOutcome(was_known=was_known, actions=actions)

    def withdraw(self, reservation_id: ReservationId, detail: str) -> list[DecodeAction]:
        """Drops a reservation whose blocks the scheduler needs; prefill keeps the KV."""
        entry = self._reservations.get(reservation_id)
        return [] if entry is None else self._abort(entry, RefusalReason.NO_ROOM, detail)

    def renew(self, envelopes: tuple[Envelope, ...]) -> tuple[bool, ...]:
        """Extends leases; answers for each whether it still holds a reservation."""
        return tuple(self._renew(envelope) for envelope in envelopes)

    def link_down(self, link: LinkId) -> list[DecodeAction]:
        """Drops what has not fully come over a link; landed hand-offs wait for their commit."""
        actions: list[DecodeAction] = []
        ends = link.ends
        is_latest = link.epoch >= self._epochs.get(ends, 0)
        for entry in self._reservations.all():
            is_peers = entry.envelope.prefill_incarnation == link.peer
            if not is_peers or not entry.misses_frames_of(ends):
                continue
            # Without frames there is no telling which link was meant, but the ranks' latest.
            used = entry.links.get(ends)
            if used == link or (used is None and is_latest):
                actions += self._abort(entry, RefusalReason.STALE, "link down")
        return actions

    def tick(self) -> list[DecodeAction]:
        """Drops what nobody renewed."""
        now = self._clock.now()
        actions: list[DecodeAction] = []
        for entry in self._reservations.all():
            if now >= entry.expires_at_s and not entry.is_aborting:
                self.counters.leases_expired += 1
                actions += self._abort(entry, RefusalReason.STALE, "lease expired")
        self._fences.expire(now)
        return actions

    # Everything below is one step of the above.

    def _note_landed(self, entry: Reservation, landed: FrameLanded | FramePlaced) -> None:
        ends = landed.link.ends
        entry.links[ends] = landed.link
        self._epochs[ends] = max(landed.link.epoch, self._epochs.get(ends, 0))
        entry.landed.add(landed.frame_index)
        entry.expires_at_s = self._clock.now() + self._config.lease_s
        self.counters.bytes_landed += landed.num_bytes

    def _check(self, envelope: Envelope, request: Request) -> KvPair | Refusal:
        terms = self._terms.check(envelope, request)
        if isinstance(terms, Refusal) or not self.is_draining:
            return terms
        return Refusal(reason=RefusalReason.DRAINING, detail="this worker drains")

    def _meet_peer(self, envelope: Envelope) -> list[DecodeAction]:
        """Drops what an earlier life of the same prefill worker left behind."""
        worker_id, incarnation = envelope.prefill_worker_id, envelope.prefill_incarnation
        if self._peers.get(worker_id) == incarnation:
            return []
        old = self._peers.get(worker_id)
        if old is not None:
            self._epochs = {ends: at for ends, at in self._epochs.items() if ends.peer != old}
        self._peers[worker_id] = incarnation
        actions: list[DecodeAction] = []
        for entry in self._reservations.all():
            theirs = entry.envelope
            if theirs.prefill_worker_id == worker_id and theirs.prefill_incarnation != incarnation:
                actions += self._abort(entry, RefusalReason.STALE, "the prefill worker restarted")
        return actions

    def _grant(
        self, call_id: int, envelope: Envelope, request: Request, pair: KvPair
    ) -> list[DecodeAction]:
        if self._reservations.find(envelope.handoff_id) is not None:
            # The older attempt's last scatter still writes the blocks of this very request.
            refusal = Refusal(
                reason=RefusalReason.NO_ROOM,
                detail="the previous attempt's blocks are still being written",
                retry_after_s=RETRY_AFTER_QUARANTINE_S,
            )
            return [self._refuse(call_id, refusal)]
        reservation_id = self._mint_id()
        outcome = self._reserver.reserve(reservation_id, request)
        if isinstance(outcome, Refusal):
            return [self._refuse(call_id, outcome)]
        num_tokens, num_cached = len(request.token_ids), outcome.num_cached_tokens
        manifest = self._terms.make_manifest(pair, num_tokens, num_cached)
        grant = self._terms.make_grant(reservation_id, pair, manifest, num_tokens, num_cached)
        entry = Reservation(
            envelope=envelope,
            request=request,
            grant=grant,
            manifest=manifest,
            expires_at_s=self._clock.now() + self._config.lease_s,
        )
        self._reservations.add(entry)
        self.counters.granted += 1
        expect = Expect(
            reservation_id=reservation_id,
            peer=envelope.prefill_incarnation,
            frames=manifest.frames,
        )
        return [expect, AnswerReserve(call_id=call_id, answer=grant)]

    def _start_if_landed(self, entry: Reservation) -> list[DecodeAction]:
        if not entry.first_tokens or not entry.has_landed:
            return []
        self._reservations.remove(entry)
        self._fences.start(entry.envelope, entry.reservation_id, self._clock.now())
        self.counters.started += 1
        start = Start(
            reservation_id=entry.reservation_id,
            envelope=entry.envelope,
            request=entry.request,
            first_tokens=entry.first_tokens,
        )
        return [
            start,
            *(
                AnswerCommit(call_id=call_id, answer=Acknowledged())
                for call_id in entry.waiting_calls
            ),
        ]

    def _abort(self, entry: Reservation, reason: RefusalReason, detail: str) -> list[DecodeAction]:
        if entry.is_aborting:
            return []
        entry.is_aborting = True
        self.counters.aborted += 1
        now = self._clock.now()
        self._fences.note_gone(entry.reservation_id, reason, now)
        self._fences.raise_above(entry.envelope.handoff_id, entry.envelope.key, now)
        self._release_if_quiet(entry)
        answer = HandoffAborted(detail=detail, reason=reason)
        return [AnswerCommit(call_id=call_id, answer=answer) for call_id in entry.waiting_calls]

    def _release_if_quiet(self, entry: Reservation) -> None:
        """Gives the blocks back, once no scatter into them is pending."""
        if entry.scattering:
            return
        self._reservations.remove(entry)
        self._reserver.release(entry.reservation_id)

    def _renew(self, envelope: Envelope) -> bool:
        if envelope.reservation_id is None:
            return False
        entry = self._reservations.get(envelope.reservation_id)
        if entry is None or entry.is_aborting or not entry.is_from(envelope):
            return False
        entry.expires_at_s = self._clock.now() + self._config.lease_s
        return True

    def _reject(self, landed: FrameLanded, detail: str) -> RejectFrame:
        self.counters.frames_rejected += 1
        return RejectFrame(landed=landed, detail=detail)

    def _refuse(self, call_id: int, refusal: Refusal) -> AnswerReserve:
        self.counters.refused += 1
        if refusal.reason is RefusalReason.STALE:
            self.counters.stale_refused += 1
        return AnswerReserve(call_id=call_id, answer=refusal)

    def _deny(
        self, call_id: int, detail: str, reason: RefusalReason = RefusalReason.STALE
    ) -> AnswerCommit:
        self.counters.stale_refused += 1
        return AnswerCommit(call_id=call_id, answer=HandoffAborted(detail=detail, reason=reason))
