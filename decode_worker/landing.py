"""Carries out what the hand-off protocol asks of a decode worker: answers, scatters, starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.reserver import SchedulerReserver
from decode_worker.scheduler import DecodeScheduler
from kv_transfer import codec
from kv_transfer.decode_actions import (
    AnswerCommit,
    AnswerReserve,
    DecodeAction,
    Expect,
    RejectFrame,
    Scatter,
    Start,
)
from kv_transfer.decode_counters import DecodeCounters
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.events import FrameLanded, FramePlaced, FrameUnloaded, LinkDown, TokensTold
from kv_transfer.expected_frames import ExpectedFrame, ExpectedFrames
from kv_transfer.shipping import Unloader, UnloadFrame, region_of
from pdserve.errors import InvalidField
from pdserve.rank.outbox import Outbox
from pdserve.request import Request, RequestId
from pdserve.rpc.codec import request_from_wire
from pdserve.rpc.v1 import handoff_pb2, inference_pb2, rank_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A sample that runs from now on."""

    request: Request
    decode_attempt: int


class LandingDesk:
    """All hand-offs into a decode rank. Engine thread only: it alone writes blocks."""

    def __init__(
        self,
        *,
        handoffs: DecodeHandoffs,
        reserver: SchedulerReserver,
        scheduler: DecodeScheduler,
        unloader: Unloader,
        block_size: int,
        outbox: Outbox,
    ) -> None:
        self._handoffs = handoffs
        self._reserver = reserver
        self._scheduler = scheduler
        self._unloader = unloader
        self._block_size = block_size
        self._outbox = outbox
        self._started: list[Started] = []

    @property
    def counters(self) -> DecodeCounters:
        """Totals since start."""
        return self._handoffs.counters

    @property
    def num_reservations(self) -> int:
        """Reservations that hold blocks."""
        return self._handoffs.num_reservations

    @property
    def num_receiving(self) -> int:
        """Reservations of which some frames have come."""
        return self._handoffs.num_receiving

    def reserve(self, call_id: int, message: handoff_pb2.ReserveRequest) -> None:
        """Grants or refuses."""
        envelope = codec.envelope_from_wire(message.envelope)
        request = request_from_wire(message.request)
        self._run(self._handoffs.reserve(call_id, envelope, request))

    def commit(self, call_id: int, message: handoff_pb2.CommitRequest) -> None:
        """Answers now or when the last frame has landed."""
        if not message.first_tokens:
            error = InvalidField("first_tokens", [], "a token for each sample that goes on")
            self._outbox.refuse(call_id, error)
            return
        envelope = codec.envelope_from_wire(message.envelope)
        tokens = tuple(codec.first_token_from_wire(wire) for wire in message.first_tokens)
        self._run(self._handoffs.commit(call_id, envelope, tokens, message.manifest_digest))

    def abort(self, call_id: int, message: handoff_pb2.AbortHandoffRequest) -> None:
        """Gives the reservation's blocks back."""
        envelope = codec.envelope_from_wire(message.envelope)
        self._run(self._handoffs.abort(envelope, message.detail))
        answer = handoff_pb2.AbortHandoffResponse()
        self._outbox.reply(call_id, rank_pb2.RankReply(abort=answer))

    def renew(self, call_id: int, message: handoff_pb2.RenewRequest) -> None:
        """Extends leases."""
        envelopes = tuple(codec.envelope_from_wire(item) for item in message.envelopes)
        answer = handoff_pb2.RenewResponse(is_alive=self._handoffs.renew(envelopes))
        self._outbox.reply(call_id, rank_pb2.RankReply(renew=answer))

    def frame_landed(self, event: FrameLanded) -> None:
        """Checks a frame and copies it into its blocks."""
        self._run(self._handoffs.frame_landed(event))

    def frame_placed(self, event: FramePlaced) -> None:
        """Notes that a link has written a frame to its blocks."""
        self._run(self._handoffs.frame_placed(event))

    def frame_unloaded(self, event: FrameUnloaded) -> None:
        """Notes that another rank has copied a frame into its blocks."""
        self._run(self._handoffs.frame_scattered(event.reservation_id, event.frame_index))

    def tokens_told(self, event: TokensTold) -> None:
        """Takes first tokens ahead of their commit."""
        self._run(self._handoffs.tokens_told(event))

    def link_down(self, event: LinkDown) -> None:
        """Drops what a dead link had not delivered."""
        self._run(self._handoffs.link_down(event.link))

    def cancel(self, request_id: RequestId, attempt: int) -> bool:
        """Drops reservations of a request; says whether there was one."""
        outcome = self._handoffs.cancel(request_id, attempt)
        self._run(outcome.actions)
        return outcome.was_known

    def withdraw(self, request_id: RequestId, attempt: int) -> None:
        """Drops a reservation that the scheduler let go; prefill keeps the KV."""
        reservation_id = self._reserver.find(request_id, attempt)
        assert reservation_id is not None
        self._run(self._handoffs.withdraw(reservation_id, "let go to make room"))

    def drain(self) -> None:
        """Refuses new reservations from now on."""
        self._handoffs.is_draining = True

    def tick(self) -> None:
        """Drops what nobody renewed."""
        self._run(self._handoffs.tick())

    def take_started(self) -> list[Started]:
        """Returns, once, the sequences that started."""
        started, self._started = self._started, []
        return started

    def forget(self, request_id: RequestId, attempt: int) -> None:
        """Drops the key of a sequence that ended."""
        self._reserver.forget(request_id, attempt)

    def _run(self, actions: Sequence[DecodeAction]) -> None:
        for action in actions:
            match action:
                case AnswerReserve():
                    answer = codec.reserve_answer_to_wire(action.answer)
                    self._outbox.reply(action.call_id, rank_pb2.RankReply(reserve=answer))
                case Expect():
                    self._expect(action)
                case AnswerCommit():
                    commit = codec.commit_answer_to_wire(action.answer)
                    self._outbox.reply(action.call_id, rank_pb2.RankReply(commit=commit))
                case Scatter():
                    self._scatter(action)
                case RejectFrame():
                    self._unloader.reject(action.landed)
                case Start():
                    self._start(action)

    def _scatter(self, action: Scatter) -> None:
        frame = action.frame
        request_id, attempt = self._reserver.key(action.reservation_id)
        table = self._scheduler.block_table(request_id, attempt)
        region = region_of(frame, table, self._block_size)
        if self._unloader.unload(UnloadFrame(landed=action.landed, region=region)):
            self._run(self._handoffs.frame_scattered(action.reservation_id, frame.index))

    def _expect(self, action: Expect) -> None:
        reservation_id = action.reservation_id
        table = self._scheduler.block_table(*self._reserver.key(reservation_id))
        frames = {
            frame.index: ExpectedFrame(
                num_bytes=frame.num_bytes,
                prefill_rank=frame.prefill_rank,
                region=region_of(frame, table, self._block_size),
            )
            for frame in action.frames
            if frame.decode_rank == 0
        }
        expected = ExpectedFrames(reservation_id=reservation_id, peer=action.peer, frames=frames)
        self._unloader.expect(expected)

    def _start(self, action: Start) -> None:
        self._unloader.withdraw(action.reservation_id)
        tokens = {token.sample_index: token.token_id for token in action.first_tokens}
        for sample in self._reserver.start(action.reservation_id, tokens):
            decode_attempt = action.envelope.decode_attempt
            self._started.append(Started(request=sample, decode_attempt=decode_attempt))

    def describe_links(self) -> list[inference_pb2.LinkInfo]:
        """Returns the live links for status pages."""
        return codec.links_to_wire(self._unloader.links())

    def close(self) -> None:
        """Closes every link and the listening socket."""
        self._unloader.close()
