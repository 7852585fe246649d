"""The turn of a decode rank: take hand-offs in, compute one token for each sequence, stream it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.join_window import JoiningRunner, JoinWindow
from decode_worker.landing import LandingDesk
from decode_worker.occupancy import LetGo
from decode_worker.progress import DecodeProgress
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.events import FrameLanded, FramePlaced, FrameUnloaded, LinkDown, TokensTold
from kv_transfer.follower_codec import event_from_wire
from pdserve.config.worker import WorkerConfig
from pdserve.engine.batch import PendingStep, StepPlan, StepRunner
from pdserve.engine.pipeline import StepPipeline
from pdserve.engine.scheduler import Stage
from pdserve.errors import DeadlineExceeded, InvalidField, PdserveError, WorkerLost
from pdserve.rank.figures import describe_load, ledger_to_wire
from pdserve.rank.outbox import Outbox
from pdserve.rank.sample_updates import report_prompt_scores, send_to_samples
from pdserve.rank.step_samples import SampledRunner, StepSamples
from pdserve.rank.tombstones import Tombstones
from pdserve.request import FinishReason, Request, RequestId, group_id_of
from pdserve.rpc.codec import finish_reason_to_wire, logprobs_to_wire, request_from_wire
from pdserve.rpc.v1 import rank_pb2, worker_pb2
from pdserve.timeline import Clock


@dataclass(slots=True)
class _Stream:
    """What the router is told of one sequence."""

    request: Request
    decode_attempt: int
    """Zero for a sequence that is prefilled here."""


class DecodeEngine:
    """Ties the scheduler, the runner and the landing desk together. Engine thread only."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        scheduler: DecodeScheduler,
        runner: StepRunner,
        landing: LandingDesk,
        outbox: Outbox,
        clock: Clock,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._window = JoinWindow(clock)
        # Stages of a pipeline are at work only with a step for each.
        self._joins_late = config.handoff.joins_late and config.engine.pipeline_parallel == 1
        self._samples = StepSamples(clock)
        sampled = SampledRunner(runner, self._samples, config.faults.step_delay_s)
        timed = JoiningRunner(sampled, self._window)
        self._pipeline = StepPipeline(timed, self._plan_step)
        self._landing = landing
        self._outbox = outbox
        self._clock = clock
        self._max_model_len = max_model_len
        self._streams: dict[RequestId, _Stream] = {}
        self._tombstones = Tombstones(clock)
        self._is_draining = False

    def handle(self, event: object) -> None:
        """Takes a message of the face or an event of a link."""
        match event:
            case FrameLanded():
                self._landing.frame_landed(event)
            case FramePlaced():
                self._landing.frame_placed(event)
            case FrameUnloaded():
                self._landing.frame_unloaded(event)
            case TokensTold():
                self._landing.tokens_told(event)
            case LinkDown():
                self._landing.link_down(event)
            case rank_pb2.ToRank():
                self._handle_message(event)
            case rank_pb2.FromFollower():
                self.handle(event_from_wire(event))
            case _:
                raise AssertionError(f"unknown event {event!r}")
        self._open_started()

    def _handle_message(self, message: rank_pb2.ToRank) -> None:
        call_id = message.call_id
        match message.WhichOneof("message"):
            case "submit":
                self._answer_submit(call_id, message.submit)
            case "cancel":
                was_known = self._cancel(message.cancel)
                answer = worker_pb2.CancelResponse(was_known=was_known)
                self._outbox.reply(call_id, rank_pb2.RankReply(cancel=answer))
            case "reserve":
                self._landing.reserve(call_id, message.reserve)
            case "commit":
                self._landing.commit(call_id, message.commit)
            case "abort":
                self._landing.abort(call_id, message.abort)
            case "renew":
                self._landing.renew(call_id, message.renew)
            case "drain":
                self._is_draining = True
                self._landing.drain()
            case "peer_reply":
                pass  # to a call that this rank made in its other role
            case other:
                raise AssertionError(f"a decode rank got {other}")

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
        if len(request.token_ids) >= self._max_model_len:
            limit = f"under {self._max_model_len} tokens"
            raise InvalidField("token_ids", len(request.token_ids), limit)
        self._tombstones.check(request)
        local = message.local_prefill
        self._scheduler.submit_local(
            request,
            local.max_tokens if local.HasField("max_tokens") else None,
            has_lost_handoff=not message.HasField("local_prefill"),
        )
        self._streams[request.request_id] = _Stream(request, decode_attempt=0)

    def _cancel(self, message: worker_pb2.CancelRequest) -> bool:
        request_id = RequestId(message.request_id)
        self._tombstones.add(request_id, message.attempt)
        was_reserved = self._landing.cancel(request_id, message.attempt)
        was_running = self._scheduler.cancel(request_id, message.attempt)
        stream = self._streams.get(request_id)
        if stream is not None and stream.request.attempt <= message.attempt:
            self._close(stream)
        was_group = self._cancel_group(request_id, message.attempt)
        return was_reserved or was_running or was_group

    def _cancel_group(self, sample_id: RequestId, attempt: int) -> bool:
        """Drops samples that have not parted yet, once none of them is wanted any more."""
        group_id = group_id_of(sample_id)
        group = None if group_id is None else self._scheduler.find(group_id)
        if group is None or group.attempt > attempt:
            return False
        if self._tombstones.covers_all(group.samples()):
            self._landing.cancel(group.request_id, attempt)
            self._scheduler.cancel(group.request_id, attempt)
            self._streams.pop(group.request_id, None)
        return True

    def _open_started(self) -> None:
        """Sequences whose hand-off has just ended get a stream to the router."""
        for started in self._landing.take_started():
            request = started.request
            if self._tombstones.covers(request):
                # One of several samples, cancelled by itself while its KV was under way.
                self._scheduler.cancel(request.request_id, request.attempt)
                self._landing.forget(request.request_id, request.attempt)
                continue
            self._streams[request.request_id] = _Stream(request, started.decode_attempt)

    def _close(self, stream: _Stream) -> None:
        request = stream.request
        del self._streams[request.request_id]
        self._landing.forget(request.request_id, request.attempt)

    def tick(self) -> None:
        """Drops what is past its deadline or lease."""
        for request_id in self._scheduler.expired(self._clock.now()):
            stream = self._streams.get(request_id)
            if stream is not None:
                error = DeadlineExceeded("the deadline passed on the decode worker")
                failed = worker_pb2.Failed(
                    code=error.grpc_code, reason=error.reason, message=str(error)
                )
                self._update(stream, worker_pb2.SequenceUpdate(failed=failed))
                self._close(stream)
                self._scheduler.cancel(request_id, stream.request.attempt)
        self._landing.tick()
        self._tombstones.expire()

    @property
    def awaited(self) -> PendingStep | None:
        """The oldest step in flight."""
        return self._pipeline.oldest

    def step(self) -> bool:
        """Launches what can be launched; streams the tokens of the oldest step, if it is over."""
        ended = self._pipeline.poll()
        if ended is None:
            return False
        self._window.note_end(ended.plan)
        self._samples.note_end(ended.plan)
        plan, result = ended.plan, ended.result
        if result.prompt_logprobs:
            report_prompt_scores(self._scheduler.live_slices(plan), result, self._outbox)
        for progress in self._scheduler.complete_step(plan, result):
            self._stream(progress)
        return True

    def pause_s(self) -> float:
        """Returns for how long there is nothing to launch, whatever comes."""
        return self._time_left_s() or math.inf

    def _time_left_s(self) -> float:
        """Returns how long the launch of the next step is put off for what is about to land."""
        oldest = self._pipeline.oldest
        if oldest is None or not self._joins_late:
            return 0.0
        if not self._landing.num_reservations or oldest.is_over():
            return 0.0
        return max(0.0, self._window.time_left_s())

    def _plan_step(self) -> StepPlan | None:
        if self._time_left_s():
            return None
        self._window.begin_plan()
        plan = self._scheduler.plan_step()
        self._return_let_go(self._scheduler.take_let_go())
        return plan

    def _stream(self, progress: DecodeProgress) -> None:
        stream = self._find_stream(progress.request_id)
        if self._tombstones.covers(stream.request):
            self._scheduler.cancel(progress.request_id, progress.attempt)
            self._close(stream)
            return
        update = worker_pb2.SequenceUpdate(
            first_index=progress.output_index, token_ids=[progress.token.token_id]
        )
        if progress.token.logprobs is not None:
            update.logprobs.append(logprobs_to_wire(progress.token.logprobs))
        is_first = progress.output_index == stream.request.num_emitted
        if is_first and progress.times.prefill_s is not None:
            update.times.CopyFrom(_local_times(progress))
        if progress.finish_reason is not None:
            update.finished.CopyFrom(_finished(stream.request, progress))
        self._update(stream, update)
        if progress.finish_reason is not None:
            self._close(stream)

    def _find_stream(self, request_id: RequestId) -> _Stream:
        """Returns a sample's stream; with the first token, samples get streams of their own."""
        if request_id not in self._streams:
            group_id = group_id_of(request_id)
            assert group_id is not None
            group = self._streams.pop(group_id)
            for one in group.request.samples():
                self._streams[one.request_id] = _Stream(one, group.decode_attempt)
        return self._streams[request_id]

    def _return_let_go(self, let_go: Sequence[LetGo]) -> None:
        for item in let_go:
            request = item.request
            if item.stage is Stage.RESERVED:
                self._landing.withdraw(request.request_id, request.attempt)
                continue
            stream = self._streams[request.request_id]
            returned = worker_pb2.Returned(
                reason=worker_pb2.Returned.REASON_PREEMPTED,
                detail=f"let go while {item.stage} to make room for older sequences",
            )
            update = worker_pb2.SequenceUpdate(first_index=item.next_index, returned=returned)
            self._update(stream, update)
            self._close(stream)

    def _update(self, stream: _Stream, update: worker_pb2.SequenceUpdate) -> None:
        update.decode_attempt = stream.decode_attempt
        send_to_samples(stream.request.samples(), update, self._outbox)

    def close(self) -> None:
        """Ends all links."""
        self._landing.close()

    def describe(self) -> rank_pb2.RankHeartbeat:
        """Returns load, ledger, links and counters."""
        ledger = self._scheduler.ledger()
        counters, totals = self._scheduler.counters, self._landing.counters
        wire_load = describe_load(self._scheduler)
        self._samples.report_into(wire_load)
        return rank_pb2.RankHeartbeat(
            has_work=self._scheduler.has_work,
            load=wire_load,
            ledger=ledger_to_wire(
                ledger,
                reservations=self._landing.num_reservations,
                leases=self._landing.num_reservations,
                transfers=self._landing.num_receiving,
            ),
            links=self._landing.describe_links(),
            counters=rank_pb2.RankCounters(
                prompt_tokens=counters.prompt_tokens,
                recomputed_prompt_tokens=counters.recomputed_tokens,
                local_prefill_tokens=counters.prompt_tokens - counters.recomputed_tokens,
                generation_tokens=counters.generation_tokens,
                prefix_cache_queries=counters.prefix_cache_queries,
                prefix_cache_hits=counters.prefix_cache_hits,
                preemptions=counters.preemptions,
                handoffs_completed=totals.started,
                handoffs_failed=totals.aborted,
                handoffs_refused=totals.refused,
                leases_expired=totals.leases_expired,
                stale_refused=totals.stale_refused + counters.stale_refused,
                frames_rejected=totals.frames_rejected,
                handoff_bytes=totals.bytes_landed,
            ),
            is_drained=self._is_draining and not ledger.sequences and self._pipeline.is_empty,
        )


def _finished(request: Request, progress: DecodeProgress) -> worker_pb2.Finished:
    assert progress.finish_reason is not None
    token_id = progress.token.token_id
    is_stop_id = progress.finish_reason is FinishReason.STOP and token_id in request.stop_ids
    return worker_pb2.Finished(
        reason=finish_reason_to_wire(progress.finish_reason),
        stop_token_id=token_id if is_stop_id else None,
    )


def _local_times(progress: DecodeProgress) -> worker_pb2.StageTimes:
    """Encodes the times of a sequence that was prefilled here."""
    times = worker_pb2.StageTimes(
        queue_s=progress.times.queue_s,
        prefill_s=progress.times.prefill_s,
        cached_tokens=progress.num_cached_tokens,
    )
    if progress.has_lost_handoff:
        times.recomputed_tokens = progress.num_computed_here
    else:
        times.local_prefill_tokens = progress.num_computed_here
    return times
