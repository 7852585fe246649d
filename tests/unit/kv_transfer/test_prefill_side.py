"""A hand-off on the prefill side, from its placement to the release of its blocks."""

import pytest

from kv_transfer.prefill_actions import (
    DropFrames,
    PrefillStage,
    ReleaseBlocks,
    ReportHandedOff,
    ReportNeedsPlacement,
    ReportRefused,
    ReportReturned,
    SendAbort,
    SendCommit,
    SendReserve,
)
from kv_transfer.prefill_side import PrefillHandoff
from kv_transfer.protocol import Acknowledged, CallFailed, HandoffAborted, Refusal, RefusalReason
from pdserve.timeline import ManualClock
from tests.unit.kv_transfer.prefill_steps import (
    STAGES,
    Setup,
    be_granted,
    commit,
    kinds,
    nothing,
    pushed,
    reserve,
    send_some,
    steps_of,
)
from tests.unit.kv_transfer.sides import CONFIG, MANIFEST, NUM_TOKENS, TOKEN, grant, target


def test_placing_asks_for_a_reservation(handoff: PrefillHandoff) -> None:
    (action,) = handoff.place(target())
    assert isinstance(action, SendReserve)
    assert action.envelope.reservation_id is None
    assert action.envelope.decode_attempt == 1


def test_each_call_for_a_reservation_has_the_time_that_settings_give_calls(
    handoff: PrefillHandoff,
) -> None:
    (action,) = handoff.place(target())
    assert isinstance(action, SendReserve)
    assert action.timeout_s == CONFIG.call_timeout_s


def test_frames_computed_before_the_grant_are_pushed_when_it_comes(
    handoff: PrefillHandoff,
) -> None:
    reserve(handoff)
    assert handoff.computed(70) == []
    assert pushed(handoff.reserve_answered(target(), grant())) == [0, 1]
    assert pushed(handoff.computed(NUM_TOKENS)) == [2, 3]
    assert handoff.computed(NUM_TOKENS) == []


def test_frames_of_a_step_in_flight_are_pushed_with_the_step_that_computes_them(
    handoff: PrefillHandoff,
) -> None:
    be_granted(handoff)
    actions = handoff.launched(70, 5)
    assert pushed(actions) == [0, 1]
    actions += handoff.launched(NUM_TOKENS, 6)
    assert pushed(actions) == [0, 1, 2, 3]
    assert steps_of(actions) == [5, 5, 6, 6]
    assert pushed(handoff.computed(70)) == []
    assert kinds(handoff.sampled(TOKEN, is_finished=False)) == [SendCommit]


def test_a_grant_in_mid_step_pushes_what_is_there_and_what_is_under_way(
    handoff: PrefillHandoff,
) -> None:
    reserve(handoff)
    handoff.launched(70, 5)
    handoff.launched(NUM_TOKENS, 6)
    handoff.computed(70)
    actions = handoff.reserve_answered(target(), grant())
    assert pushed(actions) == [0, 1, 2, 3]
    assert steps_of(actions) == [None, None, 6, 6]


def test_another_placement_in_mid_step_pushes_again(handoff: PrefillHandoff) -> None:
    be_granted(handoff)
    handoff.launched(NUM_TOKENS, 5)
    handoff.frames_lost(grant().reservation_id, "the link died")
    handoff.place(target(2))
    actions = handoff.reserve_answered(target(2), grant(2))
    assert pushed(actions) == [0, 1, 2, 3]
    assert steps_of(actions) == [5] * 4


def test_A6_a_cancel_in_mid_step_drops_frames_and_a_late_launch_pushes_none(
    handoff: PrefillHandoff,
) -> None:
    be_granted(handoff)
    handoff.launched(70, 5)
    assert kinds(handoff.cancel()) == [DropFrames, SendAbort, ReleaseBlocks]
    assert handoff.launched(NUM_TOKENS, 6) == []


def test_frames_that_are_sent_ahead_are_timed_from_the_end_of_their_step(
    handoff: PrefillHandoff, clock: ManualClock
) -> None:
    be_granted(handoff)
    handoff.launched(NUM_TOKENS, 5)
    clock.advance(1.0)
    handoff.sampled(TOKEN, is_finished=False)
    clock.advance(0.25)
    (report, _) = handoff.commit_answered(target(), Acknowledged())
    assert isinstance(report, ReportHandedOff)
    assert report.transfer_s == report.handoff_s == 0.25


def test_the_commit_goes_out_with_the_token_before_the_frames_are_through(
    handoff: PrefillHandoff,
) -> None:
    send_some(handoff)
    actions = handoff.sampled(TOKEN, is_finished=False)
    assert pushed(actions) == [2, 3]
    assert isinstance(actions[-1], SendCommit)
    assert actions[-1].first_tokens == (TOKEN,)
    assert actions[-1].envelope.reservation_id == b"res1"


def test_a_grant_after_the_token_pushes_everything_and_commits(handoff: PrefillHandoff) -> None:
    reserve(handoff)
    assert handoff.sampled(TOKEN, is_finished=False) == []
    actions = handoff.reserve_answered(target(), grant())
    assert pushed(actions) == [0, 1, 2, 3]
    assert isinstance(actions[-1], SendCommit)


@pytest.mark.parametrize("is_granted_first", [True, False])
def test_frames_that_are_sent_in_one_go_are_timed_from_then(
    handoff: PrefillHandoff, clock: ManualClock, is_granted_first: bool
) -> None:
    reserve(handoff)
    if is_granted_first:
        handoff.reserve_answered(target(), grant())
        clock.advance(1.0)
        handoff.sampled(TOKEN, is_finished=False)
    else:
        handoff.sampled(TOKEN, is_finished=False)
        clock.advance(1.0)
        handoff.reserve_answered(target(), grant())
    clock.advance(0.25)
    report, _ = handoff.commit_answered(target(), Acknowledged())
    assert isinstance(report, ReportHandedOff)
    assert report.transfer_s == 0.25


def test_the_acknowledgement_hands_off_and_releases(
    handoff: PrefillHandoff, clock: ManualClock
) -> None:
    commit(handoff)
    clock.advance(0.25)
    report, release = handoff.commit_answered(target(), Acknowledged())
    assert report == ReportHandedOff(
        decode_attempt=1,
        handoff_s=0.25,
        num_blocks=MANIFEST.num_blocks,
        num_bytes=MANIFEST.num_bytes,
        transfer_s=None,
    )
    assert release == ReleaseBlocks()
    assert handoff.is_settled


@pytest.mark.parametrize("setup", STAGES[:-1])
def test_a_token_that_ends_the_sequence_releases_and_never_commits(
    handoff: PrefillHandoff, setup: Setup
) -> None:
    setup(handoff)
    actions = handoff.sampled(TOKEN, is_finished=True)
    assert SendCommit not in kinds(actions)
    assert kinds(actions).count(SendAbort) == (setup is not nothing)
    assert actions[-1] == ReleaseBlocks()
    assert handoff.stage is PrefillStage.FINISHED


@pytest.mark.parametrize("setup", STAGES)
def test_A6_a_cancel_at_each_phase_tells_decode_and_releases_once(
    handoff: PrefillHandoff, setup: Setup
) -> None:
    setup(handoff)
    actions = handoff.cancel()
    assert kinds(actions).count(SendAbort) == (setup is not nothing)
    assert kinds(actions).count(ReleaseBlocks) == 1
    assert DropFrames in kinds(actions) or setup in (nothing, reserve)
    assert handoff.cancel() == []
    assert handoff.tick() == []
    assert handoff.computed(NUM_TOKENS) == []


def test_A7_prefill_that_is_cancelled_after_a_chunk_never_commits(
    handoff: PrefillHandoff,
) -> None:
    send_some(handoff)
    assert SendAbort in kinds(handoff.cancel())
    assert handoff.sampled(TOKEN, is_finished=False) == []


def test_A3_a_grant_that_comes_after_the_cancel_is_given_back(handoff: PrefillHandoff) -> None:
    reserve(handoff)
    handoff.cancel()
    assert not handoff.is_settled
    (action,) = handoff.reserve_answered(target(), grant())
    assert isinstance(action, SendAbort)
    assert action.envelope.reservation_id == b"res1"
    assert handoff.is_settled


@pytest.mark.parametrize(
    ("outcome", "must_abort", "retry_after_s"),
    [
        (Refusal(reason=RefusalReason.NO_ROOM, detail="", retry_after_s=0.5), False, 0.5),
        (Refusal(reason=RefusalReason.STALE, detail=""), False, 0.0),
        (CallFailed(detail="timed out"), True, None),
        (CallFailed(detail="refused", is_unreachable=True), True, None),
    ],
)
def test_a_reservation_that_fails_needs_another_placement(
    handoff: PrefillHandoff,
    outcome: Refusal | CallFailed,
    must_abort: bool,
    retry_after_s: float | None,
) -> None:
    reserve(handoff)
    actions = handoff.reserve_answered(target(), outcome)
    assert (SendAbort in kinds(actions)) == must_abort
    report = actions[-1]
    assert isinstance(report, ReportNeedsPlacement)
    assert report.retry_after_s == retry_after_s
    assert report.hold_s == CONFIG.hold_s
    assert ReleaseBlocks not in kinds(actions)


def test_a_refusal_of_a_cancelled_request_returns_it_at_once(handoff: PrefillHandoff) -> None:
    reserve(handoff)
    actions = handoff.reserve_answered(target(), Refusal(reason=RefusalReason.CANCELLED, detail=""))
    assert kinds(actions) == [ReportReturned, ReleaseBlocks]


@pytest.mark.parametrize("reason", [RefusalReason.TOO_LARGE, RefusalReason.INCOMPATIBLE])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_A2_a_refusal_for_good_gives_the_blocks_back_at_once(
    handoff: PrefillHandoff, reason: RefusalReason, is_sampled: bool
) -> None:
    reserve(handoff)
    handoff.computed(70)
    if is_sampled:
        handoff.sampled(TOKEN, is_finished=False)
    actions = handoff.reserve_answered(target(), Refusal(reason=reason, detail="never"))
    assert actions == [ReportRefused(reason=reason, detail="never"), ReleaseBlocks()]
    assert handoff.is_settled
    assert handoff.place(target(2)) == []
    assert handoff.tick() == []


def test_a_manifest_that_differs_is_not_sent(handoff: PrefillHandoff) -> None:
    reserve(handoff)
    handoff.computed(NUM_TOKENS)
    wrong = grant()
    object.__setattr__(wrong, "manifest_digest", b"other")
    actions = handoff.reserve_answered(target(), wrong)
    assert kinds(actions) == [SendAbort, ReportNeedsPlacement]
    assert isinstance(actions[0], SendAbort)
    assert actions[0].envelope.reservation_id == wrong.reservation_id


def test_another_placement_sends_everything_again_and_computes_nothing(
    handoff: PrefillHandoff,
) -> None:
    commit(handoff)
    handoff.commit_answered(target(), HandoffAborted(detail="preempted"))
    assert handoff.stage is PrefillStage.UNPLACED
    (ask,) = handoff.place(target(2))
    assert isinstance(ask, SendReserve)
    actions = handoff.reserve_answered(target(2), grant(2))
    assert pushed(actions) == [0, 1, 2, 3]
    assert isinstance(actions[-1], SendCommit)
    assert actions[-1].envelope.reservation_id == b"res2"


def test_a_placement_that_is_not_newer_is_ignored(handoff: PrefillHandoff) -> None:
    reserve(handoff)
    assert handoff.place(target(1)) == []
    handoff.reserve_answered(target(), CallFailed(detail="x"))
    assert handoff.place(target(1)) == []


@pytest.mark.parametrize("setup", [reserve, commit])
def test_a_newer_placement_leaves_the_one_that_is_under_way(
    handoff: PrefillHandoff, setup: Setup
) -> None:
    setup(handoff)
    handoff.computed(NUM_TOKENS)
    handoff.sampled(TOKEN, is_finished=False)
    *leaving, ask = handoff.place(target(2))
    assert kinds(leaving) == ([DropFrames, SendAbort] if setup is commit else [SendAbort])
    assert isinstance(ask, SendReserve)
    # What still comes from the first one is void; a grant is given back.
    late = handoff.commit_answered if setup is commit else handoff.reserve_answered
    answer = Acknowledged() if setup is commit else grant()
    assert ReleaseBlocks not in kinds(late(target(), answer))
    actions = handoff.reserve_answered(target(2), grant(2))
    assert pushed(actions) == [0, 1, 2, 3]
    assert actions[-1].envelope.reservation_id == b"res2"


def test_lost_frames_abandon_the_reservation_they_belong_to(handoff: PrefillHandoff) -> None:
    send_some(handoff)
    reservation_id = grant(1).reservation_id
    assert handoff.frames_lost(grant(2).reservation_id, "x") == []
    actions = handoff.frames_lost(reservation_id, "peer lost")
    assert kinds(actions) == [DropFrames, SendAbort, ReportNeedsPlacement]
    assert handoff.frames_lost(reservation_id, "again") == []


def test_a_lost_answer_to_the_commit_is_asked_for_again(handoff: PrefillHandoff) -> None:
    commit(handoff)
    actions = handoff.commit_answered(target(), CallFailed(detail="timed out"))
    assert kinds(actions) == [SendCommit]
    assert kinds(handoff.commit_answered(target(), Acknowledged()))[-1] is ReleaseBlocks


def test_a_decode_worker_that_is_gone_at_the_commit_is_given_up_at_once(
    handoff: PrefillHandoff,
) -> None:
    commit(handoff)
    actions = handoff.commit_answered(target(), CallFailed(detail="x", is_unreachable=True))
    assert kinds(actions) == [DropFrames, SendAbort, ReportNeedsPlacement]


def test_an_answer_of_an_older_placement_changes_nothing(handoff: PrefillHandoff) -> None:
    commit(handoff)
    handoff.frames_lost(grant().reservation_id, "x")
    handoff.place(target(2))
    assert handoff.commit_answered(target(1), Acknowledged()) == []
    assert handoff.stage is PrefillStage.RESERVING
