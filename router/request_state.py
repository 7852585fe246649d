"""The life of one request at the router: a pure state machine over worker updates.

    waiting -> prefilling -> decoding -> ended
       ^          |   ^         |
       |          v   |         |      unplaced: the prefill worker keeps the KV and wants
       |       unplaced         |      another decode worker
       |__________|_____________|      next attempt: prompt + emitted tokens, old attempt fenced

1. `begin_attempt` numbers an attempt and names its workers; only they may speak for it.
2. `apply` takes an update: stale and duplicate tokens fall out, early ones wait for their turn.
3. The end is found here, token by token, with the same rule as on the workers: a worker that dies
   right after its last token has nothing left to say.
4. `lose_worker` and `returned` updates send the request back to `waiting`.
"""

from collections.abc import Sequence
from dataclasses import replace

from pdserve.errors import PdserveError
from pdserve.request import (
    FinishReason,
    HandoffId,
    Request,
    RequestId,
    SamplingParams,
    finish_reason_after,
)
from pdserve.rpc.codec import finish_reason_from_wire
from pdserve.rpc.error_parts import error_from_parts
from pdserve.rpc.v1 import worker_pb2
from router.attempt import Cause, Fence, Finish, Phase, Placement, Token
from router.worker_key import WorkerKey

MAX_EARLY_TOKENS = 4096
"""Tokens kept for an index that has not come yet; a gap this wide is a lost message."""
LOST_DECODE_HOLD_S = 20.0
"""How long to look for another place for a request whose prefill worker has not asked yet."""


_CAUSES = {
    worker_pb2.Returned.REASON_PREEMPTED: Cause.PREEMPTED,
    worker_pb2.Returned.REASON_DRAINING: Cause.DRAINING,
}


class RequestState:
    """Everything the router must know to finish a request, whoever dies."""

    def __init__(self, request: Request, handoff_id: HandoffId, max_attempts: int) -> None:
        """Takes the request of the first attempt; its token ids are the prompt."""
        assert request.num_emitted == 0
        self.request = request
        self.handoff_id = handoff_id
        self._max_attempts = max_attempts
        self.phase = Phase.WAITING
        self.attempt = 0
        self.decode_attempt = 0
        self.placement: Placement | None = None
        self.token_ids: list[int] = []
        self.finish: Finish | None = None
        self.failure: PdserveError | None = None
        self.needs_placement: worker_pb2.NeedsPlacement | None = None
        self.num_preemptions = 0
        self.last_cause: Cause | None = None
        self.num_failed_attempts = 0
        self.next_prompt_position = 1
        """The first prompt position whose log-probabilities have not come."""
        self._emitted_at_start = 0
        self._early: dict[int, Token] = {}
        sampling = request.sampling
        self._has_scores = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self._worker_finish: tuple[int, Finish] | None = None
        self._is_prefill_done = False
        self._is_decode_lost = False
        self._was_taken = False
        self._ended_by: WorkerKey | None = None
        self._fences: list[Fence] = []

    @property
    def request_id(self) -> RequestId:
        """The client's or the router's id."""
        return self.request.request_id

    @property
    def next_index(self) -> int:
        """The first output index that has not come in order."""
        return len(self.token_ids)

    @property
    def is_ended(self) -> bool:
        """No worker can change anything any more."""
        return self.phase is Phase.ENDED

    @property
    def awaits_prefill(self) -> bool:
        """Ended by decode before the prefill worker's last word came."""
        if self.finish is None or self.placement is None or self._ended_by is None:
            return False
        return not self._is_prefill_done and self._ended_by == self.placement.decode

    @property
    def has_attempts_left(self) -> bool:
        """Another attempt may begin."""
        return self.num_failed_attempts < self._max_attempts

    @property
    def is_prompt_scored(self) -> bool:
        """All log-probabilities of the prompt are there, or none were asked for."""
        is_wanted = self.request.sampling.prompt_logprobs is not None
        return not is_wanted or self.next_prompt_position >= self.request.num_prompt_tokens

    def holders(self) -> tuple[WorkerKey, ...]:
        """Workers that may hold something of the current attempt."""
        if self.placement is None or self.phase in (Phase.WAITING, Phase.ENDED):
            return ()
        prefill = None if self._is_prefill_done else self.placement.prefill
        decode = None if self._is_decode_lost else self.placement.decode
        return tuple(key for key in (prefill, decode) if key is not None)

    def speaks_for(self, worker: WorkerKey) -> bool:
        """Says whether a worker's stream still carries updates of the current attempt."""
        return worker in self.holders()

    def begin_attempt(self, placement: Placement, deadline_s: float | None) -> Request:
        """Starts the next attempt and returns what to submit."""
        assert self.phase is Phase.WAITING
        self.attempt += 1
        self.decode_attempt = 0 if placement.prefill is None else 1
        self.placement = placement
        self.phase = Phase.DECODING if placement.prefill is None else Phase.PREFILLING
        self.needs_placement = None
        self._emitted_at_start = self.next_index
        self._early.clear()
        self._worker_finish = None
        self._is_prefill_done = placement.prefill is None
        self._is_decode_lost = False
        base = self.request
        return Request(
            request_id=base.request_id,
            token_ids=(*base.token_ids, *self.token_ids),
            num_prompt_tokens=base.num_prompt_tokens,
            sampling=self._sampling(),
            eos_token_ids=base.eos_token_ids,
            tenant_salt=base.tenant_salt,
            front_id=base.front_id,
            handoff_id=self.handoff_id,
            attempt=self.attempt,
            deadline_s=deadline_s,
            is_priority=self._was_taken,
            sample_index=base.sample_index,
            trace_id=base.trace_id,
        )

    def _sampling(self) -> SamplingParams:
        """Does not ask again for what is there: the log-probabilities come before token 1."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs is None or not (self.next_index or self.is_prompt_scored):
            return sampling
        return replace(sampling, prompt_logprobs=None)

    def begin_placement(self, decode: WorkerKey) -> int:
        """Names another decode worker for held KV and returns its decode attempt.

        A sample is placed with the others although the word that it must be is still on its way.
        """
        assert self.phase in (Phase.UNPLACED, Phase.PREFILLING)
        assert self.placement is not None
        self.decode_attempt += 1
        self.placement = Placement(prefill=self.placement.prefill, decode=decode)
        self.phase = Phase.PREFILLING
        self.needs_placement = None
        self._is_decode_lost = False
        return self.decode_attempt

    def is_current(self, worker: WorkerKey, update: worker_pb2.SequenceUpdate) -> bool:
        """Says whether an update belongs to the live attempt; others are fenced."""
        if self.placement is None or update.attempt != self.attempt:
            return False
        if self.phase in (Phase.WAITING, Phase.ENDED):
            return False
        if worker == self.placement.prefill:
            return not self._is_prefill_done
        if worker != self.placement.decode or self._is_decode_lost:
            return False
        is_local = self.placement.prefill is None
        return is_local or update.decode_attempt == self.decode_attempt

    def take_next(self, worker: WorkerKey, update: worker_pb2.SequenceUpdate) -> int | None:
        """Takes the next token of a live decode by a short cut, when it comes alone and goes on.

        Anything else is left to `is_current` and `apply`: then None, and nothing has changed.
        """
        placement, index = self.placement, len(self.token_ids)
        if (
            self.phase is not Phase.DECODING
            or placement is None
            or worker != placement.decode
            or update.attempt != self.attempt
            or update.first_index != index
            or self._has_scores
            or self._early
            or self._is_decode_lost
            or self._worker_finish is not None
            or (placement.prefill is not None and update.decode_attempt != self.decode_attempt)
            or update.HasField("times")
            or update.WhichOneof("outcome") is not None
        ):
            return None
        new_ids = update.token_ids
        if len(new_ids) != 1 or finish_reason_after(self.request, index + 1, new_ids[0]):
            return None
        self.token_ids.append(new_ids[0])
        return new_ids[0]

    def apply(self, worker: WorkerKey, update: worker_pb2.SequenceUpdate) -> Sequence[Token]:
        """Takes an update in and returns the tokens that are now in order.

        Afterwards `phase` tells what to do; WAITING means that the next attempt is due.
        """
        if not self.is_current(worker, update):
            return ()
        assert self.placement is not None
        is_from_decode = worker == self.placement.decode
        if is_from_decode and update.token_ids and self.phase is not Phase.DECODING:
            # Its tokens prove that the hand-off was acknowledged, whatever prefill knows of it.
            self.phase = Phase.DECODING
        tokens = self._take_tokens(update)
        if self.phase is not Phase.ENDED:
            self._take_outcome(is_from_decode, update)
        if self.phase is Phase.ENDED:
            self._ended_by = worker
        return tokens

    def take_prompt(
        self, worker: WorkerKey, update: worker_pb2.SequenceUpdate
    ) -> worker_pb2.PromptLogprobs | None:
        """Returns what is new of the prompt's log-probabilities; a replay repeats some."""
        if not update.HasField("prompt_logprobs") or not self.is_current(worker, update):
            return None
        piece = update.prompt_logprobs
        num_known = self.next_prompt_position - piece.first_position
        if not 0 <= num_known < len(piece.logprobs):
            return None
        first_position = self.next_prompt_position
        self.next_prompt_position += len(piece.logprobs) - num_known
        if not num_known:
            return piece
        return worker_pb2.PromptLogprobs(
            first_position=first_position, logprobs=piece.logprobs[num_known:]
        )

    def _take_tokens(self, update: worker_pb2.SequenceUpdate) -> list[Token]:
        in_order: list[Token] = []
        new_ids = update.token_ids
        if not new_ids:
            return in_order
        logprobs, first_index = update.logprobs, update.first_index
        for offset, token_id in enumerate(new_ids):
            index = first_index + offset
            if index < len(self.token_ids) or len(self._early) >= MAX_EARLY_TOKENS:
                continue
            logprob = logprobs[offset] if offset < len(logprobs) else None
            token = Token(index=index, token_id=token_id, logprob=logprob)
            if index > len(self.token_ids):
                self._early.setdefault(index, token)
                continue
            in_order.append(token)
            self._append(token_id)
            while self._early and self.finish is None and self.next_index in self._early:
                early = self._early.pop(self.next_index)
                in_order.append(early)
                self._append(early.token_id)
            if self.finish is not None:
                break
        return in_order

    def _append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        reason = finish_reason_after(self.request, len(self.token_ids), token_id)
        if reason is not None:
            stop_id = token_id if reason is FinishReason.STOP else None
            self._end_naturally(Finish(reason=reason, stop_token_id=stop_id))
        elif self._worker_finish is not None and self._worker_finish[0] == self.next_index:
            self._end_naturally(self._worker_finish[1])

    def _end_naturally(self, finish: Finish) -> None:
        self.finish = finish
        self.phase = Phase.ENDED

    def _take_outcome(self, is_from_decode: bool, update: worker_pb2.SequenceUpdate) -> None:
        outcome = update.WhichOneof("outcome")
        if outcome == "finished":
            wire = update.finished
            stop_id = wire.stop_token_id if wire.HasField("stop_token_id") else None
            finish = Finish(reason=finish_reason_from_wire(wire.reason), stop_token_id=stop_id)
            end = update.first_index + len(update.token_ids)
            if end <= self.next_index:
                self._end_naturally(finish)
            else:
                self._worker_finish = (end, finish)
        elif outcome == "failed":
            failed = update.failed
            self.fail(
                error_from_parts(code=failed.code, reason=failed.reason, message=failed.message)
            )
        elif outcome == "returned":
            reason = update.returned.reason
            self.num_preemptions += reason == worker_pb2.Returned.REASON_PREEMPTED
            self.give_up_attempt(_CAUSES.get(reason, Cause.RETURNED))
        elif outcome == "needs_placement" and not is_from_decode:
            self._take_needs_placement(update.needs_placement)
        elif outcome == "handed_off" and not is_from_decode:
            self._take_handed_off(update.handed_off)

    def _take_needs_placement(self, wanted: worker_pb2.NeedsPlacement) -> None:
        if wanted.decode_attempt != self.decode_attempt:
            return
        if self.phase is Phase.DECODING:
            # Acknowledged, but the answer was lost: two copies of the sequence could run on.
            self.give_up_attempt(Cause.RETURNED)
            return
        self.phase = Phase.UNPLACED
        self.needs_placement = wanted

    def _take_handed_off(self, handed_off: worker_pb2.HandedOff) -> None:
        if handed_off.decode_attempt != self.decode_attempt:
            return
        self._is_prefill_done = True
        if self._is_decode_lost:
            self.give_up_attempt(Cause.WORKER_LOST)
        else:
            self.phase = Phase.DECODING

    def lose_worker(self, worker: WorkerKey) -> bool:
        """Notes a worker's death; returns True if the attempt died with it."""
        if not self.speaks_for(worker):
            return False
        assert self.placement is not None
        if worker == self.placement.decode and self.phase is not Phase.DECODING:
            # Prefill still has the KV. It is given another place before it asks for one: a call to
            # a frozen worker, and a frame that it does not take, end by their time-outs only.
            self._is_decode_lost = True
            if self.phase is Phase.PREFILLING and self.placement.prefill is not None:
                self.phase = Phase.UNPLACED
                self.needs_placement = worker_pb2.NeedsPlacement(
                    detail="the decode worker is lost",
                    decode_attempt=self.decode_attempt,
                    hold_s=LOST_DECODE_HOLD_S,
                )
            return False
        if worker == self.placement.prefill and self.phase is Phase.DECODING and not self._early:
            self._is_prefill_done = True
            if self.next_index > self._emitted_at_start:
                return False
        self.give_up_attempt(Cause.WORKER_LOST)
        return True

    def give_up_attempt(self, cause: Cause) -> None:
        """Fences the current attempt; the next one continues behind the emitted tokens.

        An attempt counts as failed when a worker died in it, or when it was returned without one
        token of progress. Refusals before any work and drains do not count: waiting is bounded by
        time, and a rollout may drain any number of workers.
        """
        assert self.phase is not Phase.ENDED
        has_progress = self.next_index > self._emitted_at_start
        is_harmless = cause in (Cause.REFUSED, Cause.DRAINING) or has_progress
        if cause is Cause.WORKER_LOST or not is_harmless:
            self.num_failed_attempts += 1
        self._fence_holders()
        self._was_taken = self._was_taken or cause is not Cause.REFUSED
        self.last_cause = cause
        self.phase = Phase.WAITING
        self.needs_placement = None
        self._early.clear()

    def stop_early(self, finish: Finish) -> None:
        """Ends a request whose text hit a stop string."""
        assert self.failure is None
        self._fence_holders()
        self.finish = finish
        self.phase = Phase.ENDED

    def fail(self, error: PdserveError) -> bool:
        """Ends the request with an error; False when it had ended already."""
        if self.phase is Phase.ENDED:
            return False
        self._fence_holders()
        self.failure = error
        self.phase = Phase.ENDED
        return True

    def take_fences(self) -> list[Fence]:
        """Returns, once, the cancels that are due; a natural end needs none."""
        fences, self._fences = self._fences, []
        return fences

    def _fence_holders(self) -> None:
        self._fences.extend(Fence(worker=key, attempt=self.attempt) for key in self.holders())
