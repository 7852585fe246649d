import itertools
import random

import pytest

from pdserve.errors import InternalError, WorkerLost
from pdserve.request import (
    FinishReason,
    HandoffId,
    Incarnation,
    Request,
    RequestId,
    SamplingParams,
    WorkerId,
)
from pdserve.rpc.v1 import types_pb2, worker_pb2
from router.attempt import Cause, Finish, Phase, Placement
from router.policy import WorkerKey
from router.request_state import RequestState

PROMPT = (1, 2, 3)
EOS = 99


def _key(name: str, incarnation: int = 1) -> WorkerKey:
    return WorkerKey(worker_id=WorkerId(name), incarnation=Incarnation(incarnation))


P0, P1, D0, D1 = map(_key, ("p0", "p1", "d0", "d1"))


def _state(max_tokens: int = 5, max_attempts: int = 8, **over: object) -> RequestState:
    request = Request(
        request_id=RequestId("r"),
        token_ids=PROMPT,
        num_prompt_tokens=3,
        sampling=SamplingParams(max_tokens=max_tokens, **over),
        eos_token_ids=(EOS,),
    )
    return RequestState(request, HandoffId("h"), max_attempts)


def _placed(**over: object) -> RequestState:
    state = _state(**over)
    state.begin_attempt(Placement(prefill=P0, decode=D0), None)
    return state


def _update(
    index: int, *token_ids: int, attempt: int = 1, decode_attempt: int = 0, **outcome: object
) -> worker_pb2.SequenceUpdate:
    return worker_pb2.SequenceUpdate(
        request_id="r",
        attempt=attempt,
        decode_attempt=decode_attempt,
        first_index=index,
        token_ids=token_ids,
        **outcome,
    )


def _ids(tokens) -> list[int]:
    return [token.token_id for token in tokens]


HANDED_OFF = {"handed_off": worker_pb2.HandedOff(decode_attempt=1)}
NEEDS = {"needs_placement": worker_pb2.NeedsPlacement(decode_attempt=1, hold_s=1.0)}
LENGTH = {"finished": worker_pb2.Finished(reason=types_pb2.FINISH_REASON_LENGTH)}


def test_tokens_come_out_in_the_order_of_their_indexes():
    state = _placed()
    assert _ids(state.apply(D0, _update(1, 11, 12, decode_attempt=1))) == []
    assert _ids(state.apply(P0, _update(0, 10))) == [10, 11, 12]
    assert state.next_index == 3


def test_a_token_that_came_before_is_dropped():
    state = _placed()
    state.apply(P0, _update(0, 10))
    assert _ids(state.apply(P0, _update(0, 10))) == []
    state.apply(D0, _update(1, 11, 12, decode_attempt=1))
    assert _ids(state.apply(D0, _update(1, 11, 12, 13, decode_attempt=1))) == [13]
    assert state.token_ids == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("worker", "update"),
    [
        (P0, _update(0, 10, attempt=2)),
        (P0, _update(0, 10, attempt=0)),
        (D0, _update(0, 10, decode_attempt=2)),
        (D0, _update(0, 10, decode_attempt=0)),
        (D1, _update(0, 10, decode_attempt=1)),
        (_key("d0", 2), _update(0, 10, decode_attempt=1)),
    ],
)
def test_what_does_not_belong_to_the_live_attempt_is_fenced(worker, update):
    state = _placed()
    assert not state.is_current(worker, update)
    assert _ids(state.apply(worker, update)) == []
    assert state.phase is Phase.PREFILLING


def test_the_last_allowed_token_ends_the_request_without_a_word_from_the_worker():
    state = _placed(max_tokens=2)
    state.apply(P0, _update(0, 10))
    assert _ids(state.apply(D0, _update(1, 11, 12, decode_attempt=1))) == [11]
    assert state.finish == Finish(reason=FinishReason.LENGTH, stop_token_id=None)
    assert state.is_ended


def test_a_stop_token_ends_the_request_and_nothing_comes_after_it():
    state = _placed()
    state.apply(P0, _update(0, 10))
    assert _ids(state.apply(D0, _update(1, EOS, 12, decode_attempt=1))) == [EOS]
    assert state.finish == Finish(reason=FinishReason.STOP, stop_token_id=EOS)


def test_eos_before_min_tokens_or_when_ignored_does_not_end():
    state = _placed(min_tokens=2)
    state.apply(P0, _update(0, EOS))
    assert not state.is_ended
    state = _placed(ignore_eos=True)
    state.apply(P0, _update(0, EOS))
    assert not state.is_ended


def test_a_finish_waits_for_tokens_that_are_still_missing():
    state = _placed(max_tokens=3)
    state.apply(D0, _update(1, 11, 12, decode_attempt=1, **LENGTH))
    assert not state.is_ended
    assert _ids(state.apply(P0, _update(0, 10))) == [10, 11, 12]
    assert state.is_ended


def test_a_worker_may_end_a_request_for_reasons_of_its_own():
    state = _placed(max_tokens=50)
    state.apply(P0, _update(0, 10, **LENGTH))
    assert state.finish is not None
    assert state.finish.reason is FinishReason.LENGTH


def test_the_next_attempt_carries_the_emitted_tokens_and_the_same_handoff_id():
    state = _placed()
    state.apply(P0, _update(0, 10, **HANDED_OFF))
    state.apply(D0, _update(1, 11, decode_attempt=1))
    assert state.lose_worker(D0)
    request = state.begin_attempt(Placement(prefill=P1, decode=D1), 2.5)
    assert request.token_ids == (*PROMPT, 10, 11)
    assert (request.num_prompt_tokens, request.num_emitted) == (3, 2)
    assert (request.attempt, request.handoff_id, request.is_priority) == (2, "h", True)
    assert request.deadline_s == 2.5
    assert state.decode_attempt == 1


def test_a_refused_attempt_has_no_priority_and_costs_none():
    state = _placed(max_attempts=1)
    state.give_up_attempt(Cause.REFUSED)
    assert state.has_attempts_left
    assert not state.begin_attempt(Placement(prefill=P1, decode=D1), None).is_priority


def test_an_orphan_that_is_refused_keeps_its_priority():
    state = _placed()
    state.lose_worker(P0)
    state.begin_attempt(Placement(prefill=P1, decode=D1), None)
    state.give_up_attempt(Cause.REFUSED)
    assert state.begin_attempt(Placement(prefill=P1, decode=D1), None).is_priority


def test_a_dead_decode_worker_before_the_acknowledgement_is_replaced_at_once():
    state = _placed()
    state.apply(P0, _update(0, 10))
    assert not state.lose_worker(D0)
    assert state.phase is Phase.UNPLACED
    assert state.holders() == (P0,)
    state.apply(P0, _update(1, **NEEDS))
    assert state.phase is Phase.UNPLACED
    assert state.begin_placement(D1) == 2
    state.apply(P0, _update(1, **NEEDS))
    state.apply(P0, _update(1, **HANDED_OFF))
    assert state.phase is Phase.PREFILLING
    assert not state.is_current(D0, _update(1, 11, decode_attempt=1))
    assert _ids(state.apply(D1, _update(1, 11, decode_attempt=2))) == [11]


def test_a_decode_worker_that_acknowledged_and_died_at_once_is_recovered():
    state = _placed()
    state.apply(P0, _update(0, 10))
    state.lose_worker(D0)
    state.apply(P0, _update(1, **HANDED_OFF))
    assert state.phase is Phase.WAITING
    assert state.last_cause is Cause.WORKER_LOST


def test_a_prefill_worker_that_dies_after_decode_took_over_changes_nothing():
    state = _placed()
    state.apply(P0, _update(0, 10))
    state.apply(D0, _update(1, 11, decode_attempt=1))
    assert not state.lose_worker(P0)
    assert state.phase is Phase.DECODING
    assert state.holders() == (D0,)


def test_a_prefill_worker_that_took_token_one_with_it_costs_an_attempt():
    state = _placed()
    state.apply(D0, _update(1, 11, decode_attempt=1))
    assert state.lose_worker(P0)
    request = state.begin_attempt(Placement(prefill=P1, decode=D0), None)
    assert request.token_ids == PROMPT
    assert _ids(state.apply(P1, _update(0, 10, attempt=2))) == [10]


def test_a_call_for_another_place_after_decode_spoke_starts_over():
    state = _placed()
    state.apply(P0, _update(0, 10))
    state.apply(D0, _update(1, 11, decode_attempt=1))
    state.apply(P0, _update(1, **NEEDS))
    assert state.phase is Phase.WAITING
    assert {fence.worker for fence in state.take_fences()} == {P0, D0}


def test_a_late_call_for_a_place_of_an_earlier_decode_attempt_is_ignored():
    state = _placed()
    state.apply(P0, _update(0, 10, **NEEDS))
    state.begin_placement(D1)
    state.apply(P0, _update(1, **NEEDS))
    state.apply(P0, _update(1, **HANDED_OFF))
    assert state.phase is Phase.PREFILLING


def test_fences_name_all_holders_once_and_a_natural_end_has_none():
    state = _placed()
    state.apply(P0, _update(0, 10))
    assert state.fail(InternalError("x"))
    assert not state.fail(WorkerLost("y"))
    fences = state.take_fences()
    assert {(fence.worker, fence.attempt) for fence in fences} == {(P0, 1), (D0, 1)}
    assert state.take_fences() == []
    ended = _placed(max_tokens=1)
    ended.apply(P0, _update(0, 10))
    assert ended.take_fences() == []


def test_attempts_without_progress_are_counted_and_progress_is_not_punished():
    state = _state(max_tokens=50, max_attempts=2)
    for attempt in range(1, 6):
        state.begin_attempt(Placement(prefill=P0, decode=D0), None)
        update = _update(state.next_index, 10, attempt=attempt)
        update.returned.reason = worker_pb2.Returned.REASON_PREEMPTED
        state.apply(P0, update)
    assert state.num_preemptions == 5
    assert state.has_attempts_left
    for attempt in (6, 7):
        state.begin_attempt(Placement(prefill=P0, decode=D0), None)
        update = _update(state.next_index, attempt=attempt)
        update.returned.reason = worker_pb2.Returned.REASON_PREEMPTED
        state.apply(P0, update)
    assert not state.has_attempts_left


def test_drains_never_use_up_the_attempts():
    state = _state(max_attempts=1)
    for attempt in range(1, 20):
        state.begin_attempt(Placement(prefill=P0, decode=D0), None)
        update = _update(0, attempt=attempt)
        update.returned.reason = worker_pb2.Returned.REASON_DRAINING
        state.apply(P0, update)
    assert state.has_attempts_left


def test_a_workers_failure_keeps_its_reason():
    state = _placed()
    failed = worker_pb2.Failed(code=14, reason="WORKER_LOST", message="gone")
    state.apply(P0, _update(0, failed=failed))
    assert isinstance(state.failure, WorkerLost)
    assert state.is_ended


def test_completion_waits_for_prefill_only_when_decode_was_quicker():
    state = _placed(max_tokens=2)
    state.apply(P0, _update(0, 10))
    state.apply(D0, _update(1, 11, decode_attempt=1))
    assert state.awaits_prefill
    state = _placed(max_tokens=2)
    state.apply(P0, _update(0, 10, **HANDED_OFF))
    state.apply(D0, _update(1, 11, decode_attempt=1))
    assert not state.awaits_prefill


def _token(index: int) -> int:
    return 1000 + index


@pytest.mark.parametrize("seed", range(300))
def test_C14_any_order_of_deaths_repeats_and_returns_gives_each_token_once(seed):
    """A random schedule of two-sided attempts; the state must end with the undisturbed tokens."""
    rng = random.Random(seed)
    num_tokens = rng.randrange(1, 12)
    state = _state(max_tokens=num_tokens, max_attempts=1000)
    out: list[int] = []
    old: list[tuple[WorkerKey, worker_pb2.SequenceUpdate]] = []
    while not state.is_ended:
        if state.phase is Phase.WAITING:
            prefill, decode = rng.choice((P0, P1)), rng.choice((D0, D1))
            state.begin_attempt(Placement(prefill=prefill, decode=decode), None)
            pending = _attempt_updates(state, num_tokens, rng)
        event = rng.random()
        if event < 0.15:
            state.lose_worker(rng.choice((P0, P1, D0, D1)))
            if state.phase is Phase.PREFILLING and rng.random() < 0.5:
                state.lose_worker(state.placement.prefill)
        elif event < 0.25:
            returned = _update(
                state.next_index, attempt=state.attempt, decode_attempt=state.decode_attempt
            )
            returned.returned.reason = worker_pb2.Returned.REASON_PREEMPTED
            state.apply(state.placement.decode, returned)
        elif event < 0.4 and old:
            out += _ids(state.apply(*rng.choice(old)))
        elif pending:
            old.append(pending.pop(0))
            out += _ids(state.apply(*old[-1]))
        elif state.phase is not Phase.WAITING:
            # Everything was said and yet a token is missing: the workers must have died.
            state.give_up_attempt(Cause.WORKER_LOST)
    assert out == [_token(index) for index in range(num_tokens)]
    assert state.finish.reason is FinishReason.LENGTH


def _attempt_updates(
    state: RequestState, num_tokens: int, rng: random.Random
) -> list[tuple[WorkerKey, worker_pb2.SequenceUpdate]]:
    """All that both workers would say, prefill's token perhaps after decode's first ones."""
    assert state.placement is not None
    assert state.placement.prefill is not None
    start = state.next_index
    updates = [(state.placement.prefill, _attempt_update(state, start))]
    cuts = sorted({start + 1, num_tokens, rng.randrange(start + 1, num_tokens + 1)})
    for low, high in itertools.pairwise(cuts):
        updates.append((state.placement.decode, _attempt_update(state, low, high)))
    if rng.random() < 0.5 and len(updates) > 1:
        updates[0], updates[1] = updates[1], updates[0]
    return updates


def _attempt_update(
    state: RequestState, low: int, high: int | None = None
) -> worker_pb2.SequenceUpdate:
    return _update(
        low,
        *map(_token, range(low, low + 1 if high is None else high)),
        attempt=state.attempt,
        decode_attempt=0 if high is None else state.decode_attempt,
    )


def _scores(first_position: int, count: int, attempt: int = 1) -> worker_pb2.SequenceUpdate:
    logprobs = [types_pb2.TokenLogprob(token_id=first_position + i) for i in range(count)]
    update = _update(0, attempt=attempt)
    update.prompt_logprobs.first_position = first_position
    update.prompt_logprobs.logprobs.extend(logprobs)
    return update


def test_A14_prompt_scores_survive_a_retry_without_a_repeat_or_a_gap():
    state = _placed(prompt_logprobs=2)
    piece = state.take_prompt(P0, _scores(1, 1))
    assert piece is not None
    assert (piece.first_position, len(piece.logprobs)) == (1, 1)
    assert not state.is_prompt_scored
    state.lose_worker(P0)
    again = state.begin_attempt(Placement(prefill=P1, decode=D0), None)
    assert again.sampling.prompt_logprobs == 2
    assert state.take_prompt(P0, _scores(2, 1)) is None
    piece = state.take_prompt(P1, _scores(1, 2, attempt=2))
    assert piece is not None
    assert (piece.first_position, len(piece.logprobs)) == (2, 1)
    assert state.is_prompt_scored


def test_prompt_scores_that_are_there_are_not_asked_for_again():
    state = _placed(prompt_logprobs=0)
    state.take_prompt(P0, _scores(1, 2))
    state.apply(P0, _update(0, 11))
    state.give_up_attempt(Cause.RETURNED)
    again = state.begin_attempt(Placement(prefill=P1, decode=D1), None)
    assert again.sampling.prompt_logprobs is None
    assert again.token_ids == (*PROMPT, 11)
