from pdserve.face.token_log import TokenLog
from pdserve.request import FrontId, RequestId
from pdserve.rpc.v1 import types_pb2, worker_pb2
from pdserve.timeline import ManualClock

FRONT = FrontId("front")


def make_update(index: int, *tokens: int, attempt: int = 1, **outcome: object):
    return worker_pb2.SequenceUpdate(
        request_id="r", attempt=attempt, first_index=index, token_ids=tokens, **outcome
    )


def finished() -> worker_pb2.Finished:
    return worker_pb2.Finished(reason=types_pb2.FINISH_REASON_STOP)


def test_updates_coalesce_while_nobody_takes_them() -> None:
    log = TokenLog(ManualClock())
    log.append(FRONT, make_update(0, 5))
    log.append(FRONT, make_update(1, 6))
    (update,) = log.take(FRONT)
    assert (update.first_index, list(update.token_ids)) == (0, [5, 6])
    assert not log.has_news(FRONT)
    assert log.take(FRONT) == []


def test_only_what_is_new_is_taken() -> None:
    log = TokenLog(ManualClock())
    log.append(FRONT, make_update(3, 5))
    log.take(FRONT)
    log.append(FRONT, make_update(4, 6, finished=finished()))
    (update,) = log.take(FRONT)
    assert (update.first_index, list(update.token_ids)) == (4, [6])
    assert update.WhichOneof("outcome") == "finished"


def test_a_resumed_stream_gets_everything_from_its_next_index_and_the_outcome_again() -> None:
    log = TokenLog(ManualClock())
    log.append(FRONT, make_update(0, 1, 2, 3, finished=finished()))
    log.take(FRONT)
    log.resume(FRONT, [worker_pb2.Resume(request_id="r", attempt=1, next_index=1)])
    (update,) = log.take(FRONT)
    assert (update.first_index, list(update.token_ids)) == (1, [2, 3])
    assert update.WhichOneof("outcome") == "finished"


def test_a_resume_of_something_unknown_is_returned_to_the_router() -> None:
    log = TokenLog(ManualClock())
    log.resume(FRONT, [worker_pb2.Resume(request_id="r", attempt=2, next_index=4)])
    (update,) = log.take(FRONT)
    assert update.returned.reason == worker_pb2.Returned.REASON_UNKNOWN_REQUEST
    assert (update.attempt, update.first_index) == (2, 4)


def test_a_late_update_of_a_fenced_attempt_is_dropped() -> None:
    log = TokenLog(ManualClock())
    log.append(FRONT, make_update(4, 9, attempt=2))
    log.append(FRONT, make_update(0, 1, attempt=1))
    (update,) = log.take(FRONT)
    assert (update.attempt, list(update.token_ids)) == (2, [9])


def test_a_placement_request_does_not_end_a_request_but_its_end_replaces_it() -> None:
    log = TokenLog(ManualClock())
    placement = worker_pb2.NeedsPlacement(detail="no room", decode_attempt=1)
    log.append(FRONT, make_update(0, 1, needs_placement=placement))
    (first,) = log.take(FRONT)
    assert first.HasField("needs_placement")
    assert log.open_requests(FRONT) == [(RequestId("r"), 1)]
    log.append(FRONT, make_update(0, handed_off=worker_pb2.HandedOff(decode_attempt=2)))
    (second,) = log.take(FRONT)
    assert second.WhichOneof("outcome") == "handed_off"
    assert log.open_requests(FRONT) == []


def test_ended_requests_are_forgotten_after_the_retention() -> None:
    clock = ManualClock()
    log = TokenLog(clock, retention_s=30.0)
    log.append(FRONT, make_update(0, 1, finished=finished()))
    clock.advance(29.0)
    log.expire()
    assert len(log) == 1
    clock.advance(2.0)
    log.expire()
    assert len(log) == 0


def test_a_request_that_was_just_taken_is_known_to_a_front_that_reconnects() -> None:
    log = TokenLog(ManualClock())
    log.open(FRONT, RequestId("r"), 1)
    assert log.open_requests(FRONT) == [(RequestId("r"), 1)]
    log.resume(FRONT, [worker_pb2.Resume(request_id="r", attempt=1, next_index=0)])
    assert [update.WhichOneof("outcome") for update in log.take(FRONT)] == [None]
    log.append(FRONT, make_update(3, 9))
    (update,) = log.take(FRONT)
    assert (update.first_index, list(update.token_ids)) == (3, [9])


def test_a_front_that_never_comes_back_leaves_nothing() -> None:
    clock = ManualClock()
    log = TokenLog(clock, retention_s=30.0)
    log.append(FRONT, make_update(0, 1))
    log.forget(RequestId("r"), 1)
    assert not log.has_news(FRONT)
    log.append(FRONT, make_update(0, 1, finished=finished()))
    clock.advance(31.0)
    log.expire()
    assert not log.has_news(FRONT)
    assert len(log) == 0


def scores(first_position: int, count: int, num_top: int = 0) -> worker_pb2.SequenceUpdate:
    top = [types_pb2.TopLogprob(token_id=1, logprob=-1.0)] * num_top
    logprobs = [
        types_pb2.TokenLogprob(token_id=first_position + offset, logprob=-0.5, top=top)
        for offset in range(count)
    ]
    piece = worker_pb2.PromptLogprobs(first_position=first_position, logprobs=logprobs)
    return make_update(0, prompt_logprobs=piece)


def test_D12_a_long_prompt_s_scores_leave_in_pieces_before_its_first_token() -> None:
    log = TokenLog(ManualClock())
    log.append(FRONT, scores(1, 400, num_top=20))
    log.append(FRONT, make_update(0, 7))
    pieces = []
    while log.has_news(FRONT):
        (update,) = log.take(FRONT)
        pieces.append(update)
    assert [list(update.token_ids) for update in pieces[:-1]] == [[]] * (len(pieces) - 1)
    assert list(pieces[-1].token_ids) == [7]
    positions = [
        piece.prompt_logprobs.first_position + offset
        for piece in pieces[:-1]
        for offset in range(len(piece.prompt_logprobs.logprobs))
    ]
    assert positions == list(range(1, 401))
    assert all(piece.ByteSize() < 64 * 1024 for piece in pieces)


def test_a_long_prompt_s_scores_do_not_hold_up_another_request() -> None:
    log = TokenLog(ManualClock())
    log.append(FRONT, scores(1, 400, num_top=20))
    other = make_update(0, 5)
    other.request_id = "other"
    log.append(FRONT, other)
    assert [update.request_id for update in log.take(FRONT)] == ["r", "other"]


def test_a_resumed_stream_gets_the_scores_that_it_lacks() -> None:
    log = TokenLog(ManualClock())
    log.append(FRONT, scores(1, 10))
    log.take(FRONT)
    log.resume(
        FRONT,
        [worker_pb2.Resume(request_id="r", attempt=1, next_index=0, next_prompt_position=7)],
    )
    (update,) = log.take(FRONT)
    assert update.prompt_logprobs.first_position == 7
    assert len(update.prompt_logprobs.logprobs) == 4
