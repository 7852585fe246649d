"""A hand-off on the decode side, from the reservation to the start of its sequence."""

from dataclasses import replace

import pytest

from kv_transfer.decode_actions import AnswerCommit, DecodeAction, RejectFrame, Start
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.protocol import Acknowledged, FirstToken, Grant, Refusal, RefusalReason
from pdserve.request import Incarnation, WorkerId
from tests.unit.kv_transfer.decode_steps import (
    NUM_FRAMES,
    RESERVATION,
    aborted,
    ask,
    be_committed,
    commit,
    land,
    reason,
    receive_all,
)
from tests.unit.kv_transfer.sides import (
    CONFIG,
    MANIFEST,
    REQUEST,
    TOKEN,
    FakeReserver,
    envelope,
    landed,
)


def test_a_reservation_is_granted_with_what_prefill_needs_to_send(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    answer = ask(decode)
    assert isinstance(answer, Grant)
    assert answer.manifest_digest == MANIFEST.digest
    assert answer.lease_s == CONFIG.lease_s
    assert reserver.held == {answer.reservation_id}


def test_a_repeated_reserve_gets_the_same_grant_and_takes_nothing_more(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    assert ask(decode) == ask(decode)
    assert len(reserver.held) == 1


def test_a_refusal_of_the_scheduler_is_passed_on(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    reserver.refusal = Refusal(reason=RefusalReason.NO_ROOM, detail="full", retry_after_s=0.3)
    assert ask(decode) == reserver.refusal
    assert decode.num_reservations == 0
    reserver.refusal = None
    assert isinstance(ask(decode), Grant)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"decode_incarnation": Incarnation(3)}, RefusalReason.STALE),
        ({"decode_worker_id": WorkerId("other")}, RefusalReason.STALE),
        ({"compatibility_digest": b"other"}, RefusalReason.INCOMPATIBLE),
        ({"tenant_salt_digest": b"other"}, RefusalReason.INCOMPATIBLE),
        ({"attempt": 2}, RefusalReason.STALE),
    ],
)
def test_every_field_of_the_envelope_is_checked_before_anything_is_taken(
    decode: DecodeHandoffs,
    reserver: FakeReserver,
    change: dict[str, object],
    expected: RefusalReason,
) -> None:
    sent = replace(envelope(), **change)  # type: ignore[arg-type]
    assert reason(ask(decode, sent, REQUEST)) is expected
    assert reserver.held == set()


def test_a_draining_worker_refuses_and_finishes_what_it_granted(decode: DecodeHandoffs) -> None:
    be_committed(decode)
    decode.is_draining = True
    other = replace(REQUEST, handoff_id="h2", request_id="r2")  # type: ignore[arg-type]
    sent = replace(envelope(), handoff_id=other.handoff_id)
    assert reason(ask(decode, sent, other)) is RefusalReason.DRAINING
    actions = [action for index in range(1, NUM_FRAMES) for action in land(decode, index)]
    assert isinstance(actions[0], Start)


@pytest.mark.parametrize("has_commit_first", [True, False])
def test_commit_and_frames_start_the_sequence_in_either_order(
    decode: DecodeHandoffs, reserver: FakeReserver, has_commit_first: bool
) -> None:
    ask(decode)
    actions: list[DecodeAction] = []
    if has_commit_first:
        assert commit(decode) == []
    for index in reversed(range(NUM_FRAMES)):
        actions += land(decode, index)
    if not has_commit_first:
        assert actions == []
        actions = commit(decode)
    start, answer = actions
    assert isinstance(start, Start)
    assert start.first_tokens == (TOKEN,)
    assert answer == AnswerCommit(call_id=5, answer=Acknowledged())
    assert decode.num_reservations == 0
    assert reserver.released == []


def test_a_repeated_commit_is_acknowledged_once_each_and_starts_once(
    decode: DecodeHandoffs,
) -> None:
    be_committed(decode)
    assert commit(decode, call_id=6) == []
    actions = [action for index in range(1, NUM_FRAMES) for action in land(decode, index)]
    assert [type(action) for action in actions] == [Start, AnswerCommit, AnswerCommit]
    assert commit(decode, call_id=7) == [AnswerCommit(call_id=7, answer=Acknowledged())]


def test_A8_commits_for_unknown_or_altered_reservations_are_aborted(
    decode: DecodeHandoffs,
) -> None:
    ask(decode)
    assert aborted(commit(decode, reservation=99)).reason is RefusalReason.STALE
    for change in (
        {"decode_incarnation": Incarnation(3)},
        {"prefill_incarnation": Incarnation(3)},
        {"decode_attempt": 2},
        {"handoff_id": "other"},
        {"reservation_id": None},
        {"tenant_salt_digest": b"other"},
    ):
        sent = replace(envelope(reservation=1), **change)  # type: ignore[arg-type]
        aborted(decode.commit(5, sent, (TOKEN,), MANIFEST.digest))
    assert decode.num_reservations == 1


def test_A8_a_consumed_handoff_cannot_be_used_again(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    receive_all(decode)
    commit(decode)
    (rejected,) = decode.frame_landed(landed(0))
    assert isinstance(rejected, RejectFrame)
    assert reason(ask(decode)) is RefusalReason.STALE
    assert reserver.held == {RESERVATION}


def test_two_different_first_tokens_abort(decode: DecodeHandoffs) -> None:
    be_committed(decode)
    other = FirstToken(token_id=8, output_index=0)
    actions = decode.commit(6, envelope(reservation=1), (other,), MANIFEST.digest)
    assert len([action for action in actions if isinstance(action, AnswerCommit)]) == 2
    assert decode.num_reservations == 0


def test_a_commit_for_another_manifest_aborts(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    receive_all(decode)
    aborted(decode.commit(5, envelope(reservation=1), (TOKEN,), b"other"))
    assert reserver.released == [RESERVATION]
