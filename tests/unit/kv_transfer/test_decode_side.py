from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_transfer.decode_actions import (
    AnswerCommit,
    AnswerReserve,
    DecodeAction,
    Expect,
    RejectFrame,
    Scatter,
    Start,
)
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.events import FrameLanded, FramePlaced, LinkId
from kv_transfer.protocol import (
    Acknowledged,
    Envelope,
    FirstToken,
    Grant,
    HandoffAborted,
    Identity,
    Refusal,
    RefusalReason,
)
from pdserve.request import HandoffId, Incarnation, Request, RequestId, ReservationId, WorkerId
from pdserve.timeline import ManualClock
from tests.unit.kv_transfer.sides import (
    CONFIG,
    LINK,
    MANIFEST,
    PREFILL,
    REQUEST,
    TOKEN,
    FakeReserver,
    envelope,
    landed,
    make_decode,
)

NUM_FRAMES = len(MANIFEST.frames)
RESERVATION = ReservationId(b"res1")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def reserver() -> FakeReserver:
    return FakeReserver()


@pytest.fixture
def decode(clock: ManualClock, reserver: FakeReserver) -> DecodeHandoffs:
    return make_decode(clock, reserver)


def ask(
    decode: DecodeHandoffs, sent: Envelope | None = None, request: Request | None = None
) -> Grant | Refusal:
    sent = sent or envelope()
    request = request or replace(REQUEST, attempt=sent.attempt)
    return reserve_answer(decode.reserve(1, sent, request))


def reserve_answer(actions: list[DecodeAction]) -> Grant | Refusal:
    (answer,) = (action.answer for action in actions if isinstance(action, AnswerReserve))
    return answer


def reason(answer: Grant | Refusal) -> RefusalReason:
    assert isinstance(answer, Refusal)
    return answer.reason


def commit(decode: DecodeHandoffs, call_id: int = 5, reservation: int = 1) -> list[DecodeAction]:
    sent = envelope(reservation=reservation)
    return decode.commit(call_id, sent, (TOKEN,), MANIFEST.digest)


def land(decode: DecodeHandoffs, index: int) -> list[DecodeAction]:
    (scatter,) = decode.frame_landed(landed(index))
    assert isinstance(scatter, Scatter)
    return decode.frame_scattered(scatter.reservation_id, index)


def aborted(actions: list[DecodeAction]) -> HandoffAborted:
    (answer,) = (action.answer for action in actions if isinstance(action, AnswerCommit))
    assert isinstance(answer, HandoffAborted)
    return answer


def be_granted(decode: DecodeHandoffs) -> None:
    ask(decode)


def receive_some(decode: DecodeHandoffs) -> None:
    ask(decode)
    land(decode, 0)


def receive_all(decode: DecodeHandoffs) -> None:
    ask(decode)
    for index in range(NUM_FRAMES):
        land(decode, index)


def be_committed(decode: DecodeHandoffs) -> None:
    receive_some(decode)
    commit(decode)


Setup = Callable[[DecodeHandoffs], None]
STAGES = [be_granted, receive_some, receive_all, be_committed]


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


@pytest.mark.parametrize(
    "bad",
    [
        landed(1, is_intact=False),
        landed(1, num_bytes=17),
        landed(0),
        landed(NUM_FRAMES),
        landed(-1),
    ],
    ids=["checksum", "size", "duplicate", "beyond", "negative"],
)
def test_A9_one_bad_frame_fails_the_whole_handoff(
    decode: DecodeHandoffs, reserver: FakeReserver, bad: FrameLanded
) -> None:
    be_committed(decode)
    rejected, answer = decode.frame_landed(bad)
    assert isinstance(rejected, RejectFrame)
    aborted([answer])
    assert reserver.released == [RESERVATION]
    assert decode.counters.frames_rejected == 1
    aborted(commit(decode, call_id=6))


def test_A9_a_frame_of_another_worker_touches_nothing(decode: DecodeHandoffs) -> None:
    ask(decode)
    (rejected,) = decode.frame_landed(landed(0, link=LinkId(Incarnation(77), 1)))
    assert isinstance(rejected, RejectFrame)
    assert decode.num_reservations == 1


def test_frames_for_unknown_reservations_are_rejected(decode: DecodeHandoffs) -> None:
    (rejected,) = decode.frame_landed(landed(0, reservation=42))
    assert isinstance(rejected, RejectFrame)


@pytest.mark.parametrize("setup", STAGES)
def test_A10_blocks_stay_out_of_use_while_a_scatter_into_them_is_pending(
    decode: DecodeHandoffs, reserver: FakeReserver, setup: Setup
) -> None:
    if setup is receive_all:
        ask(decode)
        decode.frame_landed(landed(0))
    else:
        setup(decode)
        decode.frame_landed(landed(1))
    decode.abort(envelope(), "given up")
    assert reserver.released == []
    pending = 0 if setup is receive_all else 1
    assert reason(ask(decode, envelope(decode_attempt=2))) is RefusalReason.NO_ROOM
    assert decode.frame_scattered(RESERVATION, pending) == []
    assert reserver.released == [RESERVATION]
    assert isinstance(ask(decode, envelope(decode_attempt=3)), Grant)


def test_A10_late_frames_after_the_release_touch_no_block(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    receive_some(decode)
    decode.abort(envelope(), "given up")
    assert reserver.released == [RESERVATION]
    assert isinstance(decode.frame_landed(landed(1))[0], RejectFrame)


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


def placed(index: int, **other: object) -> FramePlaced:
    one = landed(index)
    fields = {
        "link": one.link,
        "reservation_id": one.reservation_id,
        "frame_index": index,
        "num_bytes": one.num_bytes,
        "is_intact": True,
    }
    return FramePlaced(**fields | other)  # type: ignore[arg-type]


def test_links_may_write_the_frames_of_a_new_reservation_but_not_twice(
    decode: DecodeHandoffs,
) -> None:
    expect, answer = decode.reserve(1, envelope(), REQUEST)
    assert isinstance(expect, Expect)
    assert expect.frames == MANIFEST.frames
    assert expect.peer == envelope().prefill_incarnation
    assert decode.reserve(2, envelope(), REQUEST) == [replace(answer, call_id=2)]


def test_a_hand_off_starts_when_its_last_frame_is_placed(decode: DecodeHandoffs) -> None:
    ask(decode)
    commit(decode)
    for index in range(NUM_FRAMES - 1):
        assert decode.frame_placed(placed(index)) == []
    start, acknowledged = decode.frame_placed(placed(NUM_FRAMES - 1))
    assert isinstance(start, Start)
    assert isinstance(acknowledged, AnswerCommit)


@pytest.mark.parametrize(
    "other", [{"is_intact": False}, {"num_bytes": 1}, {"frame_index": NUM_FRAMES}]
)
def test_a_placed_frame_with_a_fault_ends_its_hand_off_and_frees_the_blocks_at_once(
    decode: DecodeHandoffs, reserver: FakeReserver, other: dict[str, object]
) -> None:
    ask(decode)
    commit(decode)
    assert aborted(decode.frame_placed(placed(0, **other))).reason is RefusalReason.INCOMPATIBLE
    assert not reserver.held
    assert decode.counters.frames_rejected == 1
    assert decode.frame_placed(placed(1)) == [], "it came after the end"
