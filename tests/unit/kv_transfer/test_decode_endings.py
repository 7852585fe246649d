"""How a hand-off ends on the decode side before it was handed over, and what is left of it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_transfer.decode_actions import AnswerCommit, DecodeAction, Start
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.events import LinkId
from kv_transfer.protocol import Grant, Identity, RefusalReason
from pdserve.request import HandoffId, Incarnation, RequestId
from pdserve.timeline import ManualClock
from tests.unit.kv_transfer.decode_steps import (
    RESERVATION,
    STAGES,
    Setup,
    aborted,
    ask,
    be_committed,
    commit,
    reason,
    receive_all,
)
from tests.unit.kv_transfer.sides import (
    CONFIG,
    LINK,
    PREFILL,
    REQUEST,
    FakeReserver,
    envelope,
    landed,
)

RESTARTED = Identity(
    worker_id=PREFILL.worker_id,
    incarnation=Incarnation(11),
    compatibility_digest=PREFILL.compatibility_digest,
    shape=PREFILL.shape,
)


def leave_by_abort(decode: DecodeHandoffs, clock: ManualClock) -> list[DecodeAction]:
    return decode.abort(envelope(), "given up")


def leave_by_cancel(decode: DecodeHandoffs, clock: ManualClock) -> list[DecodeAction]:
    return decode.cancel(REQUEST.request_id, 1).actions


def leave_by_newer_attempt(decode: DecodeHandoffs, clock: ManualClock) -> list[DecodeAction]:
    return decode.reserve(9, envelope(2), replace(REQUEST, attempt=2))


def leave_by_newer_decode_attempt(decode: DecodeHandoffs, clock: ManualClock) -> list[DecodeAction]:
    return decode.reserve(9, envelope(1, 2), REQUEST)


def leave_by_lease(decode: DecodeHandoffs, clock: ManualClock) -> list[DecodeAction]:
    clock.advance(CONFIG.lease_s)
    return decode.tick()


def leave_by_restart_of_the_peer(decode: DecodeHandoffs, clock: ManualClock) -> list[DecodeAction]:
    other = replace(REQUEST, handoff_id=HandoffId("h2"), request_id=RequestId("r2"))
    sent = replace(envelope(me=RESTARTED), handoff_id=other.handoff_id)
    return decode.reserve(9, sent, other)


EXITS = [
    leave_by_abort,
    leave_by_cancel,
    leave_by_newer_attempt,
    leave_by_newer_decode_attempt,
    leave_by_lease,
    leave_by_restart_of_the_peer,
]


@pytest.mark.parametrize("setup", STAGES)
@pytest.mark.parametrize("leave", EXITS)
def test_A6_every_exit_at_every_stage_releases_once_and_answers_the_commit(
    decode: DecodeHandoffs,
    reserver: FakeReserver,
    clock: ManualClock,
    setup: Setup,
    leave: Callable[[DecodeHandoffs, ManualClock], list[DecodeAction]],
) -> None:
    setup(decode)
    actions = leave(decode, clock)
    assert reserver.released == [RESERVATION]
    assert RESERVATION not in reserver.held
    commits = [action for action in actions if isinstance(action, AnswerCommit)]
    assert len(commits) == (setup is be_committed)
    leave(decode, clock)
    decode.tick()
    assert reserver.released.count(RESERVATION) == 1


def test_A1_a_cancel_that_comes_before_the_reserve_fences_it(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    assert not decode.cancel(REQUEST.request_id, 2).was_known
    assert reason(ask(decode, envelope(1))) is RefusalReason.CANCELLED
    assert reason(ask(decode, envelope(2))) is RefusalReason.CANCELLED
    assert isinstance(ask(decode, envelope(3)), Grant)


def test_A1_an_abort_that_overtakes_its_reserve_fences_it(decode: DecodeHandoffs) -> None:
    decode.abort(envelope(), "cancelled")
    assert reason(ask(decode)) is RefusalReason.STALE
    assert isinstance(ask(decode, envelope(decode_attempt=2)), Grant)


def test_a_commit_after_a_cancel_says_that_it_was_cancelled(decode: DecodeHandoffs) -> None:
    receive_all(decode)
    assert decode.cancel(REQUEST.request_id, 1).was_known
    assert aborted(commit(decode)).reason is RefusalReason.CANCELLED


def test_an_older_attempt_is_refused_and_leaves_the_newer_alone(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    ask(decode, envelope(2))
    assert reason(ask(decode, envelope(1, 9))) is RefusalReason.STALE
    decode.abort(envelope(1, 9), "late")
    assert len(reserver.held) == 1


def test_an_abort_after_the_start_stops_the_sequence(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    receive_all(decode)
    commit(decode)
    decode.abort(envelope(reservation=1), "no answer came")
    decode.abort(envelope(reservation=1), "again")
    assert reserver.stopped == [RESERVATION]
    assert reserver.released == []
    aborted(commit(decode))


def test_a_newer_attempt_stops_the_sequence_of_the_older(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    receive_all(decode)
    commit(decode)
    assert isinstance(ask(decode, envelope(2)), Grant)
    assert reserver.stopped == [RESERVATION]


def test_an_abort_meant_for_another_incarnation_is_ignored(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    ask(decode)
    decode.abort(replace(envelope(), decode_incarnation=Incarnation(3)), "late")
    assert len(reserver.held) == 1


def test_renewals_keep_a_reservation_for_ever(
    decode: DecodeHandoffs, clock: ManualClock, reserver: FakeReserver
) -> None:
    ask(decode)
    for _ in range(100):
        clock.advance(CONFIG.lease_s * 0.9)
        assert decode.renew((envelope(reservation=1),)) == (True,)
        decode.tick()
    assert reserver.released == []


def test_renewals_of_what_is_gone_or_not_theirs_say_so(decode: DecodeHandoffs) -> None:
    ask(decode)
    stranger = replace(envelope(reservation=1), prefill_incarnation=Incarnation(5))
    assert decode.renew(
        (envelope(reservation=1), envelope(reservation=2), envelope(), stranger)
    ) == (True, False, False, False)


def test_a_dead_link_drops_what_came_over_it_and_keeps_what_landed(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    receive_all(decode)
    decode.link_down(LINK)
    assert reserver.released == []
    assert isinstance(commit(decode)[0], Start)


def test_a_dead_link_drops_reservations_without_frames_unless_a_newer_link_is_in_use(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    newer = LinkId(LINK.peer, 2)
    ask(decode)
    decode.frame_landed(landed(0, link=newer))
    decode.frame_scattered(RESERVATION, 0)
    other = replace(REQUEST, handoff_id="h2", request_id="r2")  # type: ignore[arg-type]
    ask(decode, replace(envelope(), handoff_id=other.handoff_id), other)
    decode.link_down(LINK)
    assert reserver.released == []
    decode.link_down(newer)
    assert sorted(reserver.released) == [b"res1", b"res2"]


def test_tombstones_do_not_pile_up(decode: DecodeHandoffs, clock: ManualClock) -> None:
    for number in range(1000):
        decode.cancel(RequestId(f"r{number}"), 1)
        decode.abort(replace(envelope(), handoff_id=f"h{number}"), "x")  # type: ignore[arg-type]
    assert len(decode._fences) == 2000
    clock.advance(1000.0)
    decode.tick()
    assert len(decode._fences) == 0
