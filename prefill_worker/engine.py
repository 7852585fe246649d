"""The turn of a prefill rank: queue, compute chunks, hand KV off, tell the router."""

import math

from kv_transfer import codec
from kv_transfer.events import FrameSent, LinkDown
from kv_transfer.follower_codec import event_from_wire
from kv_transfer.protocol import FirstToken
from pdserve.config.worker import WorkerConfig
from pdserve.engine.batch import PendingStep, StepPlan, StepRunner
from pdserve.engine.pipeline import StepPipeline
from pdserve.errors import DeadlineExceeded, InvalidField, PdserveError, WorkerLost
from pdserve.rank.figures import describe_load, ledger_to_wire
from pdserve.rank.outbox import Outbox
from pdserve.rank.sample_updates import failed_update, report_prompt_scores, send_to_samples
from pdserve.rank.step_samples import SampledRunner, StepSamples
from pdserve.rank.tombstones import Tombstones
from pdserve.request import FinishReason, RequestId, group_id_of
from pdserve.rpc.codec import finish_reason_to_wire, logprobs_to_wire, request_from_wire
from pdserve.rpc.v1 import rank_pb2, worker_pb2
from pdserve.timeline import Clock
from prefill_worker.handoff import HandoffDesk
from prefill_worker.scheduler import FirstSample, PrefillProgress, PrefillScheduler

LINK_HEAD_START_S = 0.004
"""Frames of 2,048 tokens take a link 1.2 ms by itself. Launching a prompt's kernels meanwhile takes
20 ms of Python, and makes each of the link's steps wait for the interpreter (H200)."""
MIN_TOKENS_BEHIND = 1024
"""So much in flight keeps the device at work until the launch that gave way is made."""


class PrefillEngine:
    """Ties the scheduler, the runner and the hand-offs together. Engine thread only."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        scheduler: PrefillScheduler,
        runner: StepRunner,
        desk: HandoffDesk,
        outbox: Outbox,
        clock: Clock,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._samples = StepSamples(clock)
        timed = SampledRunner(runner, self._samples, config.faults.step_delay_s)
        self._pipeline = StepPipeline(timed, self._plan_step, desk.launched)
        self._desk = desk
        self._outbox = outbox
        self._clock = clock
        self._max_model_len = max_model_len
        self._tombstones = Tombstones(clock)
        self._is_draining = False
        self._gives_way = config.engine.device == "cuda" and config.engine.pipeline_parallel == 1

    def handle(self, event: object) -> None:
        """Takes a message of the face or an event of a link."""
        match event:
            case FrameSent():
                self._desk.frame_sent(event)
            case LinkDown():
                self._desk.link_down(event)
            case rank_pb2.ToRank():
                self._handle_message(event)
            case rank_pb2.FromFollower():
                self.handle(event_from_wire(event))
            case _:
                raise AssertionError(f"unknown event {event!r}")

    def _handle_message(self, message: rank_pb2.ToRank) -> None:
        call_id = message.call_id
        match message.WhichOneof("message"):
            case "submit":
                self._answer_submit(call_id, message.submit)
            case "place_decode":
                self._answer_place(call_id, message.place_decode)
            case "cancel":
                was_known = self._cancel(message.cancel)
                answer = worker_pb2.CancelResponse(was_known=was_known)
                self._outbox.reply(call_id, rank_pb2.RankReply(cancel=answer))
            case "peer_reply":
                self._desk.peer_replied(call_id, message.peer_reply)
            case "drain":
                self._is_draining = True
            case other:
                raise AssertionError(f"a prefill rank got {other}")

    def _answer_submit(self, call_id: int, message: worker_pb2.SubmitRequest) -> None:
        try:
            self._submit(message)
        except PdserveError as error:
            self._outbox.refuse(call_id, error)
            return
        reply = rank_pb2.RankReply(submit=worker_pb2.SubmitResponse())
        self._outbox.reply(call_id, reply)

    def _submit(self, message: worker_pb2.SubmitRequest) -> None:
        request = request_from_wire(message.request)
        if self._is_draining:
            raise WorkerLost("this worker is draining")
        if not message.HasField("decode"):
            raise InvalidField("decode", None, "set: a prefill worker hands its KV off")
        if len(request.token_ids) >= self._max_model_len:
            limit = f"under {self._max_model_len} tokens"
            raise InvalidField("token_ids", len(request.token_ids), limit)
        self._tombstones.check(request)
        self._desk.drop_older(request)
        self._scheduler.submit(request)
        self._desk.open(request, codec.target_from_wire(message.decode))

    def _answer_place(self, call_id: int, message: worker_pb2.PlaceDecodeRequest) -> None:
        request_id = RequestId(message.request_id)
        try:
            self._desk.place(request_id, message.attempt, codec.target_from_wire(message.decode))
        except PdserveError as error:
            # The hold time ended, or a cancel came, while the router chose.
            self._outbox.refuse(call_id, error)
            return
        reply = rank_pb2.RankReply(place_decode=worker_pb2.PlaceDecodeResponse())
        self._outbox.reply(call_id, reply)

    def _cancel(self, message: worker_pb2.CancelRequest) -> bool:
        request_id = RequestId(message.request_id)
        self._tombstones.add(request_id, message.attempt)
        was_known = self._desk.cancel(request_id, message.attempt)
        group_id = group_id_of(request_id)
        if group_id is not None and self._desk.holds(group_id, message.attempt):
            was_known = True
            if self._tombstones.covers_all(self._desk.live_samples(group_id)):
                self._desk.cancel(group_id, message.attempt)
        return was_known

    def tick(self) -> None:
        """Looks at deadlines, leases, hold times and frames that no link had room for."""
        for request_id in self._scheduler.expired(self._clock.now()):
            request = self._desk.request(request_id)
            error = DeadlineExceeded("the deadline passed on the prefill worker")
            send_to_samples(self._desk.live_samples(request_id), failed_update(error), self._outbox)
            self._desk.cancel(request_id, request.attempt)
        self._desk.tick()
        self._tombstones.expire()

    @property
    def awaited(self) -> PendingStep | None:
        """The oldest step in flight."""
        return self._pipeline.oldest

    def step(self) -> bool:
        """Launches what can be launched; passes on what the oldest step made, if it is over."""
        ended = self._pipeline.poll()
        if ended is None:
            return False
        plan, result = ended.plan, ended.result
        self._samples.note_end(plan)
        self._desk.shipments.end_step()
        if result.prompt_logprobs:
            report_prompt_scores(self._scheduler.live_slices(plan), result, self._outbox)
        for progress in self._scheduler.complete_step(plan, result):
            self._pass_on(progress)
        return True

    def pause_s(self) -> float:
        """Returns how long the next launch gives way to links."""
        return self._head_start_left_s() or math.inf

    def _head_start_left_s(self) -> float:
        since_s = self._desk.shipments.since_s
        if since_s is None or not self._gives_way:
            return 0.0
        if self._pipeline.num_tokens_in_flight < MIN_TOKENS_BEHIND or self._is_device_idle():
            return 0.0
        return max(0.0, since_s + LINK_HEAD_START_S - self._clock.now())

    def _is_device_idle(self) -> bool:
        oldest = self._pipeline.oldest
        return oldest is None or oldest.is_over()

    def _plan_step(self) -> StepPlan | None:
        """Asks for the reservations of what is computed soon, and plans."""
        if self._head_start_left_s():
            return None
        for request in self._scheduler.requests_in_window():
            self._desk.enter_window(request.request_id)
        plan = self._scheduler.plan_step()
        if plan is None:
            return None
        for part in plan.slices:
            # One step may take more requests than the window announced.
            self._desk.enter_window(part.request.request_id)
        return plan

    def _pass_on(self, progress: PrefillProgress) -> None:
        request_id = progress.request_id
        if not progress.samples:
            self._desk.computed(request_id, progress.num_computed)
            return
        assert progress.output_index is not None
        # A sample may have been cancelled by itself while the prompt was computed.
        live = [one for one in progress.samples if not self._tombstones.covers(one.request)]
        for one in live:
            self._send_first(request_id, one, progress.output_index)
        # Token 1 first, then the commit, then the frames that are left: packing them takes longest,
        # and neither of the others needs it.
        self._outbox.flush()
        firsts = [
            FirstToken(
                token_id=one.token.token_id,
                output_index=progress.output_index,
                sample_index=one.request.sample_index,
            )
            for one in live
            if one.finish_reason is None
        ]
        self._desk.sampled(request_id, firsts)

    def _send_first(self, request_id: RequestId, one: FirstSample, output_index: int) -> None:
        update = worker_pb2.SequenceUpdate(
            request_id=one.request.request_id,
            attempt=one.request.attempt,
            first_index=output_index,
            token_ids=[one.token.token_id],
        )
        if one.request.sample_index == self._desk.request(request_id).sample_index:
            # Told once: of several samples the first one speaks for the prompt that they share.
            times = self._scheduler.times(request_id)
            update.times.CopyFrom(
                worker_pb2.StageTimes(
                    queue_s=times.queue_s,
                    prefill_s=times.prefill_s,
                    cached_tokens=self._scheduler.num_cached_tokens(request_id),
                )
            )
        if one.token.logprobs is not None:
            update.logprobs.append(logprobs_to_wire(one.token.logprobs))
        if one.finish_reason is not None:
            update.finished.CopyFrom(finished_with(one))
        self._outbox.update(one.request.front_id, update)

    def close(self) -> None:
        """Ends all links."""
        self._desk.close()

    def describe(self) -> rank_pb2.RankHeartbeat:
        """Returns load, ledger, links and counters."""
        ledger = self._scheduler.ledger()
        counters = self._scheduler.counters
        totals = self._desk.totals
        wire_load = describe_load(self._scheduler)
        self._samples.report_into(wire_load, totals.latest)
        return rank_pb2.RankHeartbeat(
            has_work=self._scheduler.has_work,
            load=wire_load,
            ledger=ledger_to_wire(
                ledger,
                reservations=0,
                leases=self._desk.num_leases,
                transfers=self._desk.num_pending_frames,
            ),
            links=self._desk.describe_links(),
            counters=rank_pb2.RankCounters(
                prompt_tokens=counters.prompt_tokens,
                generation_tokens=counters.generation_tokens,
                prefix_cache_queries=counters.prefix_cache_queries,
                prefix_cache_hits=counters.prefix_cache_hits,
                handoffs_completed=totals.completed,
                handoffs_failed=totals.failed,
                handoffs_refused=totals.refused,
                leases_expired=totals.leases_expired,
                stale_refused=counters.stale_refused,
                handoff_bytes=totals.num_bytes,
                handoff_seconds=totals.seconds,
            ),
            is_drained=(
                self._is_draining
                and not ledger.sequences
                and self._desk.is_idle
                and self._pipeline.is_empty
            ),
        )


def finished_with(one: FirstSample) -> worker_pb2.Finished:
    """Encodes the end of a sample whose first token here is its last."""
    assert one.finish_reason is not None
    token_id = one.token.token_id
    is_stop_id = one.finish_reason is FinishReason.STOP and token_id in one.request.stop_ids
    return worker_pb2.Finished(
        reason=finish_reason_to_wire(one.finish_reason),
        stop_token_id=token_id if is_stop_id else None,
    )
