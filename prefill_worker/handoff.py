"""Carries out what the hand-off protocol asks of a prefill worker: calls, frames, releases."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer import codec
from kv_transfer.events import FrameSent, LinkDown
from kv_transfer.outbox import FrameOutbox
from kv_transfer.prefill_actions import (
    DropFrames,
    PrefillAction,
    PushFrame,
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
from kv_transfer.prefill_side import PrefillHandoff
from kv_transfer.protocol import (
    DecodeTarget,
    FirstToken,
    Identity,
    Refusal,
)
from kv_transfer.shipping import ShipFrame, Shipper, region_of
from pdserve.cache.kv_marks import KvMarks
from pdserve.config.model import KvGeometry
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.engine.batch import StepPlan
from pdserve.engine.scheduler import Stage
from pdserve.errors import WorkerLost
from pdserve.rank.outbox import Outbox
from pdserve.rank.sample_updates import failed_update, send_to_samples
from pdserve.request import Request, RequestId, ReservationId
from pdserve.rpc.v1 import handoff_pb2, inference_pb2, rank_pb2, worker_pb2
from pdserve.timeline import Clock
from prefill_worker.decode_peers import commit_answer, peer_of, refusal_error, reserve_answer
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.shipments import Shipments
from prefill_worker.totals import HandoffTotals

_RETURN_REASONS = {
    ReturnReason.PLACEMENT_TIMEOUT: worker_pb2.Returned.REASON_PLACEMENT_TIMEOUT,
    ReturnReason.TRANSFER_FAILED: worker_pb2.Returned.REASON_TRANSFER_FAILED,
}


@dataclass(slots=True)
class _Desk:
    """One request's hand-off and the target its window will ask."""

    handoff: PrefillHandoff
    first_target: DecodeTarget | None


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A call to a decode worker that has no answer yet."""

    handoff: PrefillHandoff
    action: SendReserve | SendCommit | SendRenew | None


class HandoffDesk:
    """All hand-offs of a prefill rank. Engine thread only.

    Owns nothing of the KV: blocks belong to the scheduler's sequences until `ReleaseBlocks`, and
    frames are copies that belong to the link once pushed.
    """

    def __init__(  # noqa: PLR0913 - where the parts meet
        self,
        *,
        me: Identity,
        geometry: KvGeometry,
        config: HandoffConfig,
        faults: FaultConfig,
        scheduler: PrefillScheduler,
        shipper: Shipper,
        outbox: Outbox,
        clock: Clock,
        marks: KvMarks | None = None,
    ) -> None:
        """`marks` are in the runner's steps; None: frames leave when their step has ended."""
        self.totals = HandoffTotals()
        self.shipments = Shipments(clock)
        self._me = me
        self._geometry = geometry
        self._config = config
        self._faults = faults
        self._scheduler = scheduler
        self._shipper = shipper
        self._outbox = outbox
        self._clock = clock
        self._marks = marks
        self._open: dict[RequestId, _Desk] = {}
        self._settling: list[PrefillHandoff] = []
        self._calls: dict[int, _OpenCall] = {}
        self._frames = FrameOutbox()
        self._sending: dict[ReservationId, PrefillHandoff] = {}

    @property
    def num_leases(self) -> int:
        """Reservations held on decode workers."""
        return sum(desk.handoff.reservation_id is not None for desk in self._open.values())

    @property
    def num_pending_frames(self) -> int:
        """Frames that no link has taken yet."""
        return len(self._frames)

    @property
    def is_idle(self) -> bool:
        """True when no hand-off is under way."""
        return not self._open

    def request(self, request_id: RequestId) -> Request:
        """Returns a request that is here."""
        return self._open[request_id].handoff.request

    def open(self, request: Request, target: DecodeTarget) -> None:
        """Starts a hand-off; the decode worker is asked when the request enters the window."""
        handoff = PrefillHandoff(
            request=request,
            me=self._me,
            geometry=self._geometry,
            config=self._config,
            clock=self._clock,
        )
        self._open[request.request_id] = _Desk(handoff, target)

    def enter_window(self, request_id: RequestId) -> None:
        """Asks for the reservation of a request that will be computed soon."""
        desk = self._open[request_id]
        if desk.first_target is not None:
            target, desk.first_target = desk.first_target, None
            self._run(desk.handoff, desk.handoff.place(target))

    def place(self, request_id: RequestId, attempt: int, target: DecodeTarget) -> None:
        """Takes the router's next choice.

        Raises:
            WorkerLost: the request is not held here any more; the router starts it anew.
        """
        desk = self._open.get(request_id)
        if desk is None or desk.handoff.request.attempt != attempt:
            raise WorkerLost(f"attempt {attempt} of {request_id} is not held here any more")
        if desk.first_target is not None:
            # It waits for its window still: a reservation now could starve those before it.
            desk.first_target = target
            return
        self._run(desk.handoff, desk.handoff.place(target))

    def launched(self, plan: StepPlan) -> None:
        """Notes a step that was just launched; frames that it completes go out ahead of its end."""
        if self._marks is None:
            return
        step = self._marks.newest
        self.shipments.begin_step(step)
        for part in plan.slices:
            request_id = part.request.request_id
            handoff = self._open[request_id].handoff
            if part.start == self._scheduler.num_cached_tokens(request_id):
                self._carry_out(handoff, handoff.computed(part.start))
            self._carry_out(handoff, handoff.launched(part.end, step))
        # All at once: the first layers of all prompts come before the last ones of any.
        self._push_frames()

    def computed(self, request_id: RequestId, num_tokens: int) -> None:
        """Passes on progress; frames that became whole go out."""
        handoff = self._open[request_id].handoff
        self._run(handoff, handoff.computed(num_tokens))

    def live_samples(self, request_id: RequestId) -> tuple[Request, ...]:
        """Returns the samples of a request that did not end here."""
        return self._open[request_id].handoff.live_samples

    def holds(self, request_id: RequestId, attempt: int) -> bool:
        """Says whether this attempt of a request, or an older one, is here."""
        desk = self._open.get(request_id)
        return desk is not None and desk.handoff.request.attempt <= attempt

    def sampled(self, request_id: RequestId, tokens: Sequence[FirstToken]) -> None:
        """Passes on the first tokens of the samples that go on; none: all have ended."""
        handoff = self._open[request_id].handoff
        self._run(handoff, handoff.sampled(*tokens, is_finished=not tokens))

    def drop_older(self, request: Request) -> None:
        """Ends an older attempt of a request that comes again."""
        desk = self._open.get(request.request_id)
        if desk is not None and desk.handoff.request.attempt < request.attempt:
            self._run(desk.handoff, desk.handoff.cancel())

    def cancel(self, request_id: RequestId, attempt: int) -> bool:
        """Ends this attempt or an older one; says whether there was one."""
        desk = self._open.get(request_id)
        if desk is None or desk.handoff.request.attempt > attempt:
            return False
        self._run(desk.handoff, desk.handoff.cancel())
        return True

    def frame_sent(self, event: FrameSent) -> None:
        """Takes a link's progress."""
        self._shipper.take(event)
        self.shipments.sent(event.reservation_id, event.frame_index)
        handoff = self._sending.get(event.reservation_id)
        if handoff is not None:
            self._run(handoff, handoff.frame_sent(event.reservation_id, event.frame_index))
        self._push_frames()

    def link_down(self, event: LinkDown) -> None:
        """Takes a link's death: what it had not sent needs another place."""
        self._shipper.take(event)
        for reservation_id in event.lost:
            self.shipments.drop(reservation_id)
            handoff = self._sending.get(reservation_id)
            if handoff is not None:
                self._run(handoff, handoff.frames_lost(reservation_id, event.detail))
        self._push_frames()

    def tick(self) -> None:
        """Looks at leases and hold times."""
        for desk in list(self._open.values()):
            self._run(desk.handoff, desk.handoff.tick())
        self._push_frames()
        self._settling = [handoff for handoff in self._settling if not handoff.is_settled]

    def peer_replied(self, call_id: int, reply: rank_pb2.PeerReply) -> None:
        """Takes a decode worker's answer; one to a call before this role is nobody's any more."""
        call = self._calls.pop(call_id, None)
        if call is None:
            return
        handoff = call.handoff
        match call.action:
            case SendReserve(target=target):
                answer = reserve_answer(reply)
                self.totals.refused += isinstance(answer, Refusal)
                self._run(handoff, handoff.reserve_answered(target, answer))
                self._open_links(handoff)
            case SendCommit(target=target):
                self._run(handoff, handoff.commit_answered(target, commit_answer(reply)))
            case SendRenew(target=target):
                if reply.HasField("renew"):
                    is_alive = all(reply.renew.is_alive)
                    self._run(handoff, handoff.renewed(target, is_alive=is_alive))
            case None:
                pass  # an abort: the lease covers a lost one

    def _run(self, handoff: PrefillHandoff, actions: Sequence[PrefillAction]) -> None:
        self._carry_out(handoff, actions)
        self._push_frames()

    def _carry_out(self, handoff: PrefillHandoff, actions: Sequence[PrefillAction]) -> None:
        for action in actions:
            match action:
                case SendReserve() | SendCommit() | SendRenew():
                    self._call(handoff, action)
                case SendAbort():
                    self._abort(handoff, action)
                case PushFrame():
                    self._sending[action.reservation_id] = handoff
                    self._frames.add(action)
                case DropFrames():
                    self._drop_frames(action.reservation_id)
                case ReportNeedsPlacement():
                    self._report_needs_placement(handoff, action)
                case ReportHandedOff():
                    self._report_handed_off(handoff, action)
                case ReportReturned() | ReportRefused():
                    self._report_end(handoff, action)
                case ReleaseBlocks():
                    self._release(handoff)

    def _call(self, handoff: PrefillHandoff, action: SendReserve | SendCommit | SendRenew) -> None:
        call = rank_pb2.PeerCall(address=action.target.address, timeout_s=action.timeout_s)
        match action:
            case SendReserve():
                call.reserve.CopyFrom(codec.reserve_to_wire(action.envelope, handoff.request))
            case SendCommit():
                self._shipper.tell(action.target.incarnation, action.ahead)
                if self._faults.commit_delay_s:
                    time.sleep(self._faults.commit_delay_s)
                call.commit.CopyFrom(
                    codec.commit_to_wire(
                        action.envelope, action.first_tokens, action.manifest_digest
                    )
                )
            case SendRenew():
                call.renew.envelopes.append(codec.envelope_to_wire(action.envelope))
        self._calls[self._outbox.call_peer(call)] = _OpenCall(handoff, action)

    def _abort(self, handoff: PrefillHandoff, action: SendAbort) -> None:
        abort = handoff_pb2.AbortHandoffRequest(
            envelope=codec.envelope_to_wire(action.envelope), detail=action.detail
        )
        call = rank_pb2.PeerCall(
            address=action.target.address, timeout_s=self._config.call_timeout_s, abort=abort
        )
        self._calls[self._outbox.call_peer(call)] = _OpenCall(handoff, None)

    def _open_links(self, handoff: PrefillHandoff) -> None:
        """Making a link takes 10-400 ms on a busy machine: do it beside the prefill."""
        for link in handoff.links:
            peer = peer_of(link.target, link.endpoint, link.decode_rank)
            self._shipper.open(link.prefill_rank, peer)

    def _push_frames(self) -> None:
        """Packs and pushes what links have room for; frames of one link keep their order."""
        while (action := self._frames.take(self._shipper.has_room)) is not None:
            self._push(self._sending[action.reservation_id].request, action)

    def _push(self, request: Request, action: PushFrame) -> None:
        frame = action.frame
        table = self._scheduler.block_table(request.request_id, request.attempt)
        order = ShipFrame(
            prefill_rank=frame.prefill_rank,
            peer=peer_of(action.target, action.endpoint, frame.decode_rank),
            reservation_id=action.reservation_id,
            frame_index=frame.index,
            region=region_of(frame, table, self._geometry.block_size),
            after_step=action.after_step,
        )
        self.shipments.add(action.reservation_id, frame.index, action.after_step)
        self._shipper.ship(order)

    def _drop_frames(self, reservation_id: ReservationId) -> None:
        self._sending.pop(reservation_id, None)
        self.shipments.drop(reservation_id)
        self._shipper.cancel(reservation_id)
        self._frames.drop(reservation_id)

    def _report_needs_placement(
        self, handoff: PrefillHandoff, action: ReportNeedsPlacement
    ) -> None:
        self._update(
            handoff,
            worker_pb2.SequenceUpdate(
                needs_placement=worker_pb2.NeedsPlacement(
                    detail=action.detail,
                    decode_attempt=action.decode_attempt,
                    hold_s=action.hold_s,
                    retry_after_s=action.retry_after_s,
                )
            ),
        )

    def _report_handed_off(self, handoff: PrefillHandoff, action: ReportHandedOff) -> None:
        self.totals.note(action.num_bytes, action.handoff_s, action.transfer_s)
        times = worker_pb2.StageTimes(
            handoff_s=action.handoff_s,
            kv_blocks_shipped=action.num_blocks,
            kv_bytes_shipped=action.num_bytes,
        )
        handed_off = worker_pb2.HandedOff(decode_attempt=action.decode_attempt)
        update = worker_pb2.SequenceUpdate(times=times, handed_off=handed_off)
        self._update(handoff, update)

    def _report_end(self, handoff: PrefillHandoff, action: ReportReturned | ReportRefused) -> None:
        self.totals.failed += 1
        if isinstance(action, ReportRefused):
            self._update(handoff, failed_update(refusal_error(handoff.request, action)))
            return
        returned = worker_pb2.Returned(reason=_RETURN_REASONS[action.reason], detail=action.detail)
        self._update(handoff, worker_pb2.SequenceUpdate(returned=returned))

    def _update(self, handoff: PrefillHandoff, update: worker_pb2.SequenceUpdate) -> None:
        send_to_samples(handoff.live_samples, update, self._outbox)

    def _release(self, handoff: PrefillHandoff) -> None:
        request = handoff.request
        desk = self._open.get(request.request_id)
        assert desk is not None
        assert desk.handoff is handoff
        if handoff.reservation_id is not None:
            self._sending.pop(handoff.reservation_id, None)
        del self._open[request.request_id]
        if not handoff.is_settled:
            self._settling.append(handoff)
        if self._scheduler.stage_of(request.request_id) is Stage.HELD:
            self._scheduler.release(request.request_id, request.attempt)
        else:
            self._scheduler.cancel(request.request_id, request.attempt)

    def describe_links(self) -> list[inference_pb2.LinkInfo]:
        """Returns the live links for status pages."""
        return codec.links_to_wire(self._shipper.links())

    def close(self) -> None:
        """Closes every link."""
        self._shipper.close()
