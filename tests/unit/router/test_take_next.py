"""The short cut of `RequestState` against the long way."""

import random

import pytest

from pdserve.request import HandoffId, Incarnation, Request, RequestId, SamplingParams, WorkerId
from pdserve.rpc.v1 import types_pb2, worker_pb2
from router.attempt import Cause, Phase, Placement
from router.policy import WorkerKey
from router.request_state import RequestState

EOS = 99
P0, D0, D1 = (
    WorkerKey(worker_id=WorkerId(name), incarnation=Incarnation(1)) for name in ("p0", "d0", "d1")
)


def _decoding(*, prefill: WorkerKey | None = None, **sampling: object) -> RequestState:
    """Returns a state whose first token has come from the decode worker."""
    request = Request(
        request_id=RequestId("r"),
        token_ids=(1, 2, 3),
        num_prompt_tokens=3,
        sampling=SamplingParams(**{"max_tokens": 6, **sampling}),
        eos_token_ids=(EOS,),
    )
    state = RequestState(request, HandoffId("h"), 8)
    state.begin_attempt(Placement(prefill=prefill, decode=D0), None)
    first = _update(0, 10, decode_attempt=0 if prefill is None else 1)
    assert len(state.apply(D0, first)) == 1
    return state


def _update(
    index: int, *token_ids: int, attempt: int = 1, decode_attempt: int = 0, **more: object
) -> worker_pb2.SequenceUpdate:
    return worker_pb2.SequenceUpdate(
        request_id="r",
        attempt=attempt,
        decode_attempt=decode_attempt,
        first_index=index,
        token_ids=token_ids,
        **more,
    )


def test_the_next_token_is_taken():
    state = _decoding()
    assert state.take_next(D0, _update(1, 0)) == 0
    assert state.take_next(D0, _update(2, 12)) == 12
    assert state.token_ids == [10, 0, 12]


def test_the_next_token_of_a_handed_off_sequence_is_taken():
    state = _decoding(prefill=P0)
    assert state.take_next(D0, _update(1, 11, decode_attempt=1)) == 11


@pytest.mark.parametrize(
    ("worker", "update"),
    [
        (D1, _update(1, 11)),
        (D0, _update(1, 11, attempt=2)),
        (D0, _update(0, 10)),
        (D0, _update(2, 12)),
        (D0, _update(1)),
        (D0, _update(1, 11, 12)),
        (D0, _update(1, EOS)),
        (D0, _update(1, 11, times=worker_pb2.StageTimes(queue_s=1.0))),
        (D0, _update(1, 11, finished=worker_pb2.Finished(reason=2))),
        (D0, _update(1, 11, returned=worker_pb2.Returned())),
    ],
)
def test_anything_else_is_left_alone(worker, update):
    state = _decoding()
    assert state.take_next(worker, update) is None
    assert (state.token_ids, state.phase) == ([10], Phase.DECODING)


def test_an_old_decode_attempt_is_left_alone():
    state = _decoding(prefill=P0)
    assert state.take_next(D0, _update(1, 11, decode_attempt=0)) is None


def test_a_request_with_logprobs_is_left_to_the_long_way():
    state = _decoding(logprobs=0)
    scored = [types_pb2.TokenLogprob(token_id=11)]
    assert state.take_next(D0, _update(1, 11, logprobs=scored)) is None


def test_the_token_before_those_that_came_early_is_left_to_the_long_way():
    state = _decoding()
    assert not state.apply(D0, _update(2, 12))
    assert state.take_next(D0, _update(1, 11)) is None
    assert len(state.apply(D0, _update(1, 11))) == 2


def test_nothing_is_taken_of_an_attempt_that_was_given_up():
    state = _decoding()
    state.give_up_attempt(Cause.RETURNED)
    assert state.take_next(D0, _update(1, 11)) is None


@pytest.mark.parametrize("seed", range(30))
def test_both_ways_lead_to_the_same_state(seed):
    numbers = random.Random(seed)
    short, long = _decoding(), _decoding()
    num_short = 0
    for _ in range(12):
        index = max(0, short.next_index + numbers.choice((0, 0, 0, 0, -1, 1)))
        ids = numbers.choices((20, 21, EOS), (5, 5, 1), k=numbers.choice((1, 1, 1, 2)))
        update = _update(index, *ids, attempt=numbers.choice((1, 1, 1, 1, 2)))
        if short.take_next(D0, update) is None:
            short.apply(D0, update)
        else:
            num_short += 1
        long.apply(D0, update)
        assert short.token_ids == long.token_ids
        assert (short.phase, short.finish) == (long.phase, long.finish)
    assert num_short or short.phase is Phase.ENDED
